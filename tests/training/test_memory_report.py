import json
from types import SimpleNamespace

import torch

from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.runs.run_folder import RunFolder
from unet3d.training.memory_report import update_reserved


def test_what_captured_steps_reserve_later_is_written_down(tmp_path, monkeypatch):
    reserved = {torch.device("cuda", 0): 500, torch.device("cuda", 1): 100}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved.get(device, 0))
    devices = [torch.device("cuda", 2), *reserved]
    executor = SimpleNamespace(slots=[SimpleNamespace(device=device) for device in devices])
    record = {"slots": [{"measured": {"reserved_bytes": 300}} for _ in devices]}
    folder = RunFolder(tmp_path)
    update_reserved(record, executor, folder, Group(Ranks()))
    found = [slot["measured"]["reserved_bytes"] for slot in record["slots"]]
    assert found == [300, 500, 300]
    assert json.loads(folder.memory.read_text()) == record
    folder.memory.unlink()
    update_reserved(record, executor, folder, Group(Ranks()))
    assert not folder.memory.exists(), "a record that stays true is written again"
