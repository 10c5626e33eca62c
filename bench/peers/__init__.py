"""Other engines beside Tandem, each with its whole stack, under the same load."""
