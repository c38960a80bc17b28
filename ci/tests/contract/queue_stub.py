"""verl's TransferQueue as a dictionary in this process: the calls that verl's v1 trainers and our hooks make."""

from __future__ import annotations


class Queue:
    """`rows` and `tags` by key, one partition. Columns come back as verl's real one gives them."""

    def __init__(self, monkeypatch):
        import transfer_queue

        self.rows: dict[str, dict] = {}
        self.tags: dict[str, dict] = {}
        for name in ("kv_batch_get", "kv_batch_put", "kv_list", "kv_clear", "async_kv_batch_put"):
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        keys = [keys] if isinstance(keys, str) else keys
        return list_of_dict_to_tensordict([{name: value for name, value in self.rows[key].items()
                                            if select_fields is None or name in select_fields} for key in keys])

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for index, key in enumerate(keys):
            if tags is not None:
                self.tags.setdefault(key, {}).update(tags[index])
            for name in fields.keys() if fields is not None else ():
                value = fields[name][index]
                self.rows.setdefault(key, {})[name] = value if hasattr(value, "dim") else getattr(value, "data", value)

    async def async_kv_batch_put(self, **arguments):
        self.kv_batch_put(**arguments)

    def kv_list(self, partition_id="train"):
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)
