"""A conversion on a Ray cluster writes the same bytes as any other, even if a node dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_class_folder

pytest.importorskip("ray", reason="Ray is not installed: pip install 'wdstrain[ray]'")

# A process of its own: Ray leaves threads and warnings behind in the process that starts it.
_CODE = """
import json, sys, time
import ray
import wdstrain as wt
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
results = {"nodes": sum(node["Alive"] for node in ray.nodes())}

def lose_a_node(step):
    if "lost_at" not in results:
        results["lost_at"] = step.done
        cluster.remove_node(other, allow_graceful=False)

index = wt.convert_folder("in", "out", max_shard_samples=10, engine="ray", progress=lose_a_node)
end = time.monotonic() + 60
while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < end:  # takes seconds
    time.sleep(0.1)
results |= {"samples": len(index), "left": sum(node["Alive"] for node in ray.nodes())}
try:
    wt.convert_folder("bad", "out2", engine="ray")
except wt.SourceError as error:
    results["error"] = str(error)
json.dump(results, open("results.json", "w"))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.timeout(480)
@pytest.mark.alone  # beside other tests, the processes of Ray may wait for each other for minutes
@pytest.mark.slow
def test_a_cluster_writes_the_same_bytes_and_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"a": 150, "b": 90}, "jpg")
    write_class_folder(tmp_path / "bad", {"a": 3}, "jpg")
    (tmp_path / "bad" / "a" / "001.jpg").write_text("no picture")
    for _ in range(3):  # Ray itself sometimes aborts when a node is lost
        done = subprocess.run(
            [sys.executable, "-c", _CODE], cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
        if "You have likely discovered a bug in Ray" not in done.stderr:
            break
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert (document["nodes"], document["left"], document["samples"]) == (2, 1, 240)
    assert 0 < document["lost_at"] < 240
    assert "001.jpg: its jpg does not begin as an image does" in document["error"]
    wt.convert_folder(tmp_path / "in", tmp_path / "here", max_shard_samples=10)
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
