"""All processes of one host: how they are started, watched, found again and stopped."""
