"""All layers of a decoder, one native call per step."""
