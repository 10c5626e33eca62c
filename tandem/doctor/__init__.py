"""What this machine offers for serving models, found out without loading anything heavy."""
