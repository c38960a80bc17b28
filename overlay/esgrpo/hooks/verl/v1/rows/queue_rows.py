"""Reading and writing rows of verl's v1 TransferQueue: keys are {uid}_{session}_{index}, one row per output.

They have no deadline of ours: verl's trainers wait for the same client at every poll, before and after, and for
its controller without an end, so that one of ours would end no wait. A storage that is silent is an error of the
client's own (TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT), and what is read here is no advice: rows would be trained that are
to be masked, and a restart would lose count.
"""

from __future__ import annotations

from types import SimpleNamespace

TRAIN = "train"  # verl's partition of training prompts
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


def tags_in(partition: str) -> dict[str, dict]:
    """Tags of all keys of a partition, those of prompts included."""
    import transfer_queue

    return (transfer_queue.kv_list(partition) or {}).get(partition, {})


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
