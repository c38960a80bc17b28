"""Reading and writing rows of verl's v1 TransferQueue: keys are {uid}_{session}_{index}, one row per output."""

from __future__ import annotations

from types import SimpleNamespace

AFTER_UID = 2  # session and index follow the uid, which may hold underscores itself

def real_keys(batch) -> list[str]:
    """Keys of a KVBatchMeta without the synthetic rows that verl pads a batch with."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def group_of(key: str) -> str:
    return key.rsplit("_", AFTER_UID)[0]


def final_keys(keys) -> list[str]:
    """The last output of every session: the one that has the reward and stands for the response."""
    last: dict[str, tuple[int, str]] = {}
    for key in keys:
        session, _, index = key.rpartition("_")
        if session not in last or last[session][0] < int(index):
            last[session] = (int(index), key)
    return [key for _, key in last.values()]


def fetch(keys, partition: str, names) -> dict[str, list]:
    """Columns of these rows as plain lists, in the order of the keys."""
    import transfer_queue

    data = transfer_queue.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(names))
    return {name: _plain(data[name]) for name in names if name in data.keys()}


def _plain(column) -> list:
    if getattr(column, "is_nested", False):
        return list(column.unbind())
    return [getattr(value, "data", value) if not hasattr(value, "dim") else value for value in column]


def with_summaries(keys, partition: str, *names: str) -> list[SimpleNamespace]:
    """One object per row that has a summary of ours: key, extra_fields and the named columns."""
    columns = fetch(keys, partition, ["extra_fields", *names])
    rows = []
    for index, key in enumerate(keys):
        fields = columns["extra_fields"][index]
        if isinstance(fields, dict) and fields.get("esgrpo") is not None:
            rows.append(SimpleNamespace(key=key, extra_fields=fields, **{name: columns[name][index] for name in names}))
    return rows
