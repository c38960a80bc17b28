"""Rows of the TransferQueue, and what is trained on them."""
