"""RMS normalisation, alone or after adding to the residual stream."""
