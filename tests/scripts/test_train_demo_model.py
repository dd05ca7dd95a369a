"""`scripts/train_demo_model.py`: it learns, and a killed run ends where an uninterrupted one does."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 60


@pytest.fixture(scope="module")
def main():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import train_demo_model

        threads = torch.get_num_threads()
        yield train_demo_model.main
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    pick = random.Random(0)
    words = ["river", "stone", "walks", "over", "the", "old", "bridge", "and", "sings", "of", "seven", "lamps"]
    lines = [" ".join(pick.choices(words, k=12)) for _ in range(1200)]
    (folder / "story.txt").write_text("\n".join(lines))
    problems = "\n\n".join(f"Question: What is {n} plus 1?\nAnswer: {n + 1}" for n in range(200))
    (folder / "more.jsonl").write_text(json.dumps({"source": "math", "text": problems}) + "\n")
    (folder / "left-out.txt").write_text("zzzz " * 500)
    return folder


def arguments(texts: Path, out: Path, *more: str) -> list[str]:
    return [
        "--model", "tiny", "--texts", str(texts), "--out", str(out), "--steps", str(STEPS), "--vocabulary", "320",
        "--batch", "4", "--length", "32", "--eval-windows", "8", "--threads", "1", "--no-autocast",
        "--exclude", "left-out*", "--long-every", "7", *more,
    ]  # fmt: skip


def snapshots(out: Path) -> list[Path]:
    return sorted((out.with_name(out.name + "-training") / "snapshots").glob("step-????????.pt"))


@pytest.mark.full
def test_a_killed_run_resumes_and_ends_with_identical_weights(main, texts, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(arguments(texts, whole))
    kill_after(10, arguments(texts, killed, "--snapshot-minutes", "0"), killed)
    reached = snapshot(killed)["progress"]["step"]
    assert 10 <= reached < STEPS
    assert not killed.exists(), "no checkpoint before the end"

    main(arguments(texts, killed))

    ends = [snapshot(out) for out in (whole, killed)]
    assert [end["progress"]["step"] for end in ends] == [STEPS, STEPS]
    assert [end["progress"]["tokens"] for end in ends] == [STEPS * 4 * 32] * 2
    same(*(end["states"][0] for end in ends))
    same(load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors"))


def kill_after(step: int, args: list[str], out: Path) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPTS / "train_demo_model.py"), *args])
    try:
        while process.poll() is None and not any(int(p.stem[5:]) >= step for p in snapshots(out)):
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()


def snapshot(out: Path) -> dict[str, Any]:
    return torch.load(snapshots(out)[-1], weights_only=True)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_loss_falls_and_the_checkpoint_loads(main, texts, tmp_path, capsys):
    out = tmp_path / "model"
    main(arguments(texts, out))
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert model.config.dtype == torch.bfloat16
    ids = tokenizer("the old bridge and the river", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss < 0.8 * torch.tensor(float(len(tokenizer))).log()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert tokenizer(chat).input_ids[0] == 1
    card = (out / "README.md").read_text()
    assert "pydoc_data.topics" in card
    assert str(tmp_path) not in card
    assert "perplexity" in capsys.readouterr().out


def test_resuming_with_other_settings_is_refused(main, texts, tmp_path):
    out = tmp_path / "model"
    main(arguments(texts, out, "--steps", "2"))
    with pytest.raises(ValueError, match="seed"):
        main(arguments(texts, out, "--seed", "1"))
    main(arguments(texts, out, "--seed", "1", "--steps", "2", "--no-resume"))


def test_problems_become_chats_and_excluded_files_stay_out(main, texts):
    from demo_training.texts import documents, read_folder

    read = {text.source: text.text for text in read_folder(texts, ("left-out*",))}
    assert set(read) == {"story.txt", "math"}
    plain, chat, *rest = documents(read["math"])
    assert plain == "Question: What is 0 plus 1?\nAnswer: 1"
    assert chat == "<|im_start|>user\nWhat is 0 plus 1?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    assert len(rest) == 2 * 199
    assert list(documents(read["story.txt"])) == [read["story.txt"]]


def test_every_epoch_visits_every_window_once(main):
    import numpy as np
    from demo_training.texts import Sampler

    sampler = Sampler(np.arange(8 * 16 + 1, dtype=np.uint16), batch=2, length=16)
    for epoch in range(2):
        rows = [row for step in range(4) for row in sampler(epoch * 4 + step)]
        assert sorted(int(row[0]) for row in rows) == [16 * n for n in range(8)]
        assert all(row.tolist() == list(range(row[0], row[0] + 17)) for row in rows)


def test_too_little_text_is_refused_before_training(main):
    import numpy as np
    from demo_training.texts import Sampler

    with pytest.raises(ValueError, match=r"^100 .* 128:"):
        Sampler(np.zeros(100, dtype=np.uint16), batch=2, length=32, long_every=3)


def test_a_mixture_is_cut_from_a_dense_model_and_loads_in_transformers(main, texts, tmp_path):
    dense, out = tmp_path / "dense", tmp_path / "mixture"
    main(arguments(texts, dense, "--steps", "2"))
    main([*arguments(texts, out, "--steps", "2", "--init", str(dense)), "--model", "mixture"])
    state = snapshot(out)["states"][0]
    assert sum(".experts." in name for name in state) == 8 * 3
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "mixtral"
    trained = trained_mixture(dense, state)
    ids = tokenizer("the old bridge and the river sings", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model.float()(ids).logits, trained.float()(ids).logits, rtol=1e-5, atol=1e-6)


def trained_mixture(dense: Path, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The model in training, with the weights that were exported."""
    from demo_training.models import create

    model = create("mixture", 0, dense, seed=0).eval()
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in state.items()})
    return model


def test_a_balanced_router_costs_one_and_a_preferred_expert_more(main):
    from demo_training.mixture import balance_loss

    even = torch.full((4, 4), 0.25)
    assert float(balance_loss(even, torch.eye(4).bool())) == pytest.approx(1)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
    assert float(balance_loss(skewed, skewed > 0.5)) == pytest.approx(4 * 0.7)
