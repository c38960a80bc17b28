"""verl's v1 trainers (sync, colocate_async, separate_async), which keep rows in a TransferQueue."""
