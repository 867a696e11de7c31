"""Texts from a run: ``jaxpar generate``, and the samples that a run writes as it trains."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from run_helpers import change, stop_after, tiny_experiment, write_text

from jaxpar.cli import main
from jaxpar.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from jaxpar.errors import ConfigError
from jaxpar.experiment import SamplesConfig
from jaxpar.models.sampling import SamplingConfig
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.generate import Continuation, Writer, _Growing, for_generation, generate
from jaxpar.runtime.loop import train

SAMPLES = SamplesConfig(every=4, prompts=("one", ""), tokens=8, sampling=SamplingConfig(1.0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of ten steps, and its experiment."""
    folder = tmp_path_factory.mktemp("generate")
    write_text(folder / "numbers.txt")
    experiment = dataclasses.replace(tiny_experiment(folder / "numbers.txt"), samples=SAMPLES)
    train(experiment, folder / "run", jax.devices()[:1], quiet=True)
    return folder / "run", experiment


@pytest.fixture
def generated(run, capfd, monkeypatch):
    """``generated(*flags)``: exit code, standard output, standard error of ``jaxpar generate RUN``."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")

    def call(*flags, folder=run[0]):
        devices = () if "--devices" in flags else ("--devices", "1")
        code = main(["generate", str(folder), *devices, *flags])
        return code, *capfd.readouterr()

    return call


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_writes_samples(run):
    """Every four steps and at the end, each prompt, by the same draws: the texts follow the weights alone."""
    records = samples(run[0])
    assert [(r["step"], r["prompt"]) for r in records] == [(s, p) for s in (4, 8, 10) for p in ("one", "")]
    assert all(1 <= r["tokens"] <= 8 for r in records)
    assert [r["text"] for r in records[:2]] != [r["text"] for r in records[-2:]]


def test_samples_of_a_resumed_run_are_those_of_a_straight_one(run, tmp_path, monkeypatch):
    """Those after the checkpoint are written again, none twice."""
    folder, experiment = run
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert train(experiment, tmp_path / "run", jax.devices()[:1], quiet=True).step < 10
    with open(tmp_path / "run" / "samples.jsonl", "a") as file:
        file.write('{"step": 10, "prompt": "one", "text": "lost"}\n{"step": 10, "pro')
    train(experiment, tmp_path / "run", jax.devices()[:1], resume=True, quiet=True)
    assert samples(tmp_path / "run") == samples(folder)


def test_the_samples_are_what_generate_writes(run, generated):
    """Of the last checkpoint, with the same seed and numbers."""
    code, out, _ = generated("--prompt", "one", "--prompt", "", "--tokens", "8", "--temperature", "1", "--json")
    assert code == 0
    want = [r for r in samples(run[0]) if r["step"] == 10]
    assert json.loads(out) == [{**r, "step": 10} for r in want]


def test_one_text_is_printed_as_it_grows(generated):
    """Prompt and text on standard output and nothing else; what it took on standard error."""
    code, out, err = generated("--prompt", "one is", "--tokens", "40", "--temperature", "0")
    assert code == 0 and out.startswith("one is") and out.endswith("\n")
    again = generated("--prompt", "one is", "--tokens", "40", "--temperature", "0", "--json")
    assert out == "one is" + json.loads(again[1])[0]["text"] + "\n"
    assert "step 10: 40 tokens" in err and "beyond the 16 tokens" in err


def test_from_python(run, generated):
    """Texts come back and nothing is printed; one text where a list belongs is not read letter by letter."""
    want = json.loads(generated("--prompt", "one is", "--tokens", "8", "--temperature", "0", "--json")[1])
    devices = jax.devices()[:1]
    got = generate(run[0], ["one is"], 8, SamplingConfig(0.0), devices=devices)
    assert [{**dataclasses.asdict(one), "step": 10} for one in got] == want and want[0]["prompt_tokens"] == 6
    for arguments in ({"prompts": "one"}, {"prompts": ["one"], "stop": "wo"}):
        with pytest.raises(ConfigError, match=r"is one text \(legal: a list of texts\)"):
            generate(run[0], devices=devices, **arguments)


def test_prompts_from_a_file_and_several_of_each(generated, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    flags = ("--prompts", str(tmp_path / "prompts.txt"), "--samples", "2", "--tokens", "6", "--temperature", "1")
    code, out, _ = generated(*flags)
    assert code == 0 and out.count("--- ") == 4 and "--- 4 of 4, ended by" in out
    texts = [one["text"] for one in json.loads(generated(*flags, "--json")[1])]
    assert texts[0] != texts[1]
    assert texts != [one["text"] for one in json.loads(generated(*flags, "--json", "--seed", "1")[1])]


def test_a_stop_text_ends_a_text_and_is_not_in_it(run):
    """Also where it is not one token, and without moving another row."""
    folder, experiment = run
    program = Program(for_generation(experiment, 1), jax.devices()[:1])
    writer = Writer(program, ByteTokenizer())
    params = Checkpoints(folder / "checkpoints").restore(10, program.abstract_state["params"], only="params")
    weights, greedy = writer.generator.ready(params), SamplingConfig(0.0)
    free = writer.write(weights, ["one is", "two"], 40, greedy)
    stop = free[0].text[5:7]
    assert len(stop) == 2
    ended = writer.write(weights, ["one is", "two"], 40, greedy, stop=[stop, "never in it"])
    assert ended[0].ended_by == "stop" and ended[0].text == free[0].text[: free[0].text.find(stop)]
    assert ended[1].text == free[1].text.split(stop)[0]


def test_a_text_goes_on_from_its_prompt(run, tmp_path):
    """Decoders of Llama-2's kind drop the first space of a text: "two" and " one" must not become "twoone"."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {"</s>": 0, "▁": 1, "o": 2, "n": 3, "e": 4, "▁one": 5, "<unk>": 6}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    writer = Writer(
        Program(for_generation(run[1], 1), jax.devices()[:1]), HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    )
    said = writer._continuation("one", *writer.tokenizer.encode(["one"]), np.array([5, 5]), ["one one"])
    assert said.text == " " and said.ended_by == "stop"
    assert writer._continuation("", np.array([0]), np.array([5, 5, 0]), []).text == "one one"


def test_what_may_become_a_stop_text_is_not_printed(capsys):
    """A stop text can cross the border of two looks at what has been written."""
    growing = _Growing(["END.", "\n\n", "E"])
    growing.show(Continuation("> ", 1, "a\n", 1, "length"))
    growing.show(Continuation("> ", 1, "a\nb EN", 2, "length"))
    assert capsys.readouterr().out == "> a\nb "
    growing.show(Continuation("> ", 1, "a\nb EN", 2, "length"), last=True)
    assert capsys.readouterr().out == "EN\n"


def test_on_eight_devices_it_is_the_same_text(run, generated):
    flags = ("--prompt", "one", "--tokens", "12", "--temperature", "0", "--json")
    want = json.loads(generated(*flags)[1])
    assert json.loads(generated(*flags, "--devices", "8", "--mesh.tensor", "2")[1]) == want


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--step", "3"), "--step: 3 is not a complete checkpoint of the run (legal: 10)"),
        (("--tokens", "0"), "--tokens: 0 is out of range"),
        (("--samples", "0"), "--samples: 0 is out of range"),
        (("--temperature", "-1"), "sampling.temperature: -1.0"),
        (("--top-p", "0"), "sampling.top_p: 0.0"),
        (("--temperature", "1e39"), "sampling.temperature: 1e+39"),
        (("--stop", ""), "--stop: 0 is an empty text"),
        (("--prompt", "a\udcff"), "prompts.0: 'a\\udcff' is not Unicode"),
        (("--stop", "\udcff"), "stop.0: '\\udcff' is not Unicode"),
        (("--prompts", "/dev/null"), "--prompts: /dev/null is empty"),
        (("--prompts", "latin-1.txt"), "--prompts: latin-1.txt is not UTF-8 text (byte 1)"),
        (("--tokens", "16777216", "--samples", "65536"), "GB for keys and values of 65536 texts up to 33554432 tokens"),
        (("--prompts", "no such file"), "no such file"),
        (("--model.embed", "32"), "saved float32"),
        (("--smoke",), "--smoke"),
    ],
)
def test_what_cannot_be_generated(generated, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin-1.txt").write_bytes(b"a\xff\n")
    code, out, err = generated(*flags)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize("changes", [{"tokens": 2**40}, {"prompts": ("a\udcff",)}, {"prompts": ()}])
def test_samples_that_cannot_be_are_refused_before_the_run(run, compiled, tmp_path, changes):
    """Not when the first is due, hours later."""
    with pytest.raises(ConfigError, match=r"GB for keys and values|is not Unicode|holds no prompt"):
        train(change(run[1], "samples", **changes), tmp_path / "run", jax.devices()[:1], quiet=True)
    assert compiled == [] and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_folder_without_a_checkpoint(run, generated, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((run[0] / "config.json").read_text())
    code, _, err = generated(folder=tmp_path / "empty")
    assert code == 2 and "holds no complete checkpoint" in err
    code, _, err = generated(folder=tmp_path / "nowhere")
    assert code == 2 and "is not a folder" in err


def test_samples_cost_one_compilation(run, compiled, tmp_path):
    """However often they are written."""
    _, experiment = run
    experiment = change(experiment, "samples", every=2)
    train(experiment, tmp_path / "run", jax.devices()[:1], quiet=True)
    assert [compiled.count(f"jit({name})") for name in ("ready", "prefill", "decode")] == [1, 1, 1]
