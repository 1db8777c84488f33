"""The examples of webdataset's README and FAQ run with `wt.WebDataset` in place of
`wds.WebDataset`.

The text of each example is webdataset's except for addresses; the test replaces the class name.
"""

from __future__ import annotations

import gc
import json
import re
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import picture
from tests.support.foreign_tars import write_members
from tests.support.servers import serving

PREPROCESS = """
import torch, torch.utils.data
import torchvision.transforms as transforms
import webdataset as wds
shuffle_buffer = 10

preproc = transforms.Compose([
    transforms.Resize((224, 224)),
    transforms.ToTensor(),
    lambda x: 1-x,
])

def preprocess(sample):
    image, json = sample
    try:
        label = json["annotations"][0]["category_id"]
    except Exception:
        label = 0
    return preproc(image), label
"""


LOADER = """
dataset = (
    wds.WebDataset("HERE/publaynet-train-{000000..000009}.tar", shardshuffle=100)
    .shuffle(1000)
    .decode("pil")
    .to_tuple("png", "json")
    .map(preprocess)
    .batched(4)
)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
loader = loader.unbatched().shuffle(1000).batched(4).with_epoch(3)
batches = list(loader)
assert [len(labels) for images, labels in batches] == [4, 4, 4]
assert batches[0][0].shape == (4, 3, 224, 224)
del loader
"""

RESNET = """
def make_sample(sample, val=False):
    return preproc(sample["png"]), sample["json"]["annotations"][0]["category_id"]

training_urls = "HERE/publaynet-train-{000000..000009}.tar"
trainset = wds.WebDataset(training_urls, resampled=True, cache_dir="CACHE", shardshuffle=False, nodesplitter=wds.split_by_node)
trainset = trainset.shuffle(1000).decode("pil").map(make_sample)
trainset = trainset.batched(8)
trainloader = wds.WebLoader(trainset, batch_size=None, num_workers=2)
trainloader = trainloader.unbatched().shuffle(100).batched(8)
trainloader = trainloader.with_epoch(30 // 8)
assert len(list(trainloader)) == 3
del trainloader
"""


FAQ = """
urls = "HERE/publaynet-train-{000000..000009}.tar"

dataset = wds.WebDataset(urls).shuffle(1000).decode("rgb").to_tuple("png", "json")
assert len(list(dataset)) == 20

dataset1 = wds.WebDataset(urls)
dataset2 = wds.WebDataset("HERE/columns-train-{000000..000009}.tar")
for (img_sample, glb_sample) in zip(iter(dataset1), iter(dataset2)):
    combined_sample = {**img_sample, **glb_sample}
    assert set(combined_sample) >= {"png", "json", "index"}

wds.WebDataset(urls, url_to_name=lambda url: hash(url), verbose=True)
dataset = wds.WebDataset(urls, resampled=True, shardshuffle=False).repeat(2).with_epoch(13)
assert len(list(dataset)) == 13
assert 0 < len(list(wds.WebDataset(urls).rsample(0.5))) <= 20

def filter(sample):
    return sample["json"]["annotations"][0]["category_id"] % 2

assert len(list(wds.WebDataset(urls).decode().select(filter))) == 10

ds1, ds2 = wds.WebDataset(urls), wds.WebDataset("HERE/columns-train-{000000..000009}.tar")
mixed = wds.RandomMix([ds1, ds2], probs=[0.5, 0.5])
assert len(list(mixed)) >= 20

with wds.WebDataset(urls) as src:
    assert len([sample["__key__"] for sample in src]) == 20
"""


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Ten shards of two samples each, and ten shards with another field of the same samples."""
    for shard in range(10):
        samples: list[tuple[str, bytes]] = []
        columns = []
        for number in (2 * shard, 2 * shard + 1):
            note = json.dumps({"annotations": [{"category_id": number}]}).encode()
            samples += [(f"PMC{number:03d}.json", note), (f"PMC{number:03d}.png", picture(number))]
            columns.append((f"PMC{number:03d}.index", b"%d" % number))
        write_members(tmp_path / f"publaynet-train-{shard:06d}.tar", samples)
        write_members(tmp_path / f"columns-train-{shard:06d}.tar", columns)
    return tmp_path


EXAMPLES = {"loader": LOADER, "resnet": RESNET, "faq": FAQ}


@pytest.mark.parametrize(("name", "place"), [("loader", "http"), *((n, "local") for n in EXAMPLES)])
def test_an_example_of_webdataset_runs(
    name: str, place: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "cache").mkdir()
    text = re.sub(r"\bwds\.WebDataset\b", "wt.WebDataset", PREPROCESS + EXAMPLES[name])
    names: dict[str, Any] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        address = str(shards) if place == "local" else stack.enter_context(serving(shards)).url
        text = text.replace("HERE", address).replace("CACHE", str(tmp_path / "cache"))
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
        exec(f"import wdstrain as wt\n{text}", names)
        names.clear()
        gc.collect()
