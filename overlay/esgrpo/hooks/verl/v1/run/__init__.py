"""Start, handshake and end of verl's v1 trainers."""
