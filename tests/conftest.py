"""Helpers of several tests: realistic tokenizers, small random models, tiny runs, local servers."""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads when it is imported
# Otherwise a name that is not a folder would be looked up online, which takes a minute or succeeds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A run takes all cores. Beside other test workers it takes a share of the cores, because otherwise
# the workers would wait for each other.
os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

import pytest
import torch
from processes import nothing_goes_on
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import train
from data import Question
from errors import InputError, run_main, say_once
from flags import parse
from papers import PROTOCOLS, as_protocol, paper_of
from plumbing import build
from policy import Policy, save_policy
from prompts import build_prompt, frame_documents
from rollout import Environment, context_of, rollout
from settings import Settings
from sft import Example, SFTSettings, example_of, train_sft
from world.toy import NOTE, make_model, make_tokenizer, shape
from world.world import World

# A second thread would only wait. This also holds for fixtures of a file that train, and for forked
# processes.
set_threads, build.set_threads = build.set_threads, lambda: None
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Gives each test one thread and the same random numbers, whichever tests ran before it."""
    torch.set_num_threads(1)  # a second one would only wait
    torch.manual_seed(0)
    say_once.cache_clear()


@pytest.fixture(autouse=True)
def same_start():
    """Does the same again after the fixtures of the module, which only the first test sets up."""
    pytest_runtest_setup()


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Large models split a text in this way before BPE: punctuation keeps the newlines after it, so
# ">\n\n" can become one token.
PIECES = Regex(
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(texts: list[str], vocab_size: int = 800) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer like that of chat models: tags are plain text, and EOS is
    not the padding token.
    """
    tokenizer, split = Tokenizer(models.BPE()), pre_tokenizers.Split(PIECES, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def bpe():
    """Returns a tokenizer trained on the texts of the protocols: a tag is several tokens, and
    "|>\\n\\n" and ">\\n\\n" are one token each.
    """
    texts = []
    for p in PROTOCOLS.values():
        texts += [p.instruction, p.direct_instruction, p.limit_notice]
    texts += [f"a {tag}\n\nb {tag} c" for p in PROTOCOLS.values() for tag in p.tags]
    fact = "Kelmouth is a town in Norland. The answer is \\boxed{5}."
    texts.append(f"Ana Bell was born in Kelmouth. {fact}")
    return train_bpe(texts * 5)


def model_of(kind: str, **sizes):
    """Returns a random model of a family: "qwen2", "qwen3", "llama", "mistral", "gpt2", ..."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def random_policy(config, seed: int) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(AutoModelForCausalLM.from_config(config)).eval()


def small(**changes) -> dict:
    """Returns the fields of a model config that answers in a millisecond. The weights are large, so
    that the output depends on the whole context.
    """
    return {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **changes,
    }


# The models have a few more output rows than the tokenizer has tokens, as hub models do.


@pytest.fixture(scope="session")
def qwen2(bpe) -> Policy:
    return random_policy(Qwen2Config(vocab_size=len(bpe) + 8, **small()), seed=0)


@pytest.fixture(scope="session")
def llama(bpe) -> Policy:
    return random_policy(LlamaConfig(vocab_size=len(bpe) + 8, **small()), seed=1)


@pytest.fixture(scope="session")
def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the built-in models: a tag of any protocol is one token, and a prompt
    is the question and a sign.
    """
    return make_tokenizer(*PROTOCOLS.values())


@pytest.fixture(scope="session")
def toy_policy(toy_tokenizer) -> Policy:
    """Returns the built-in tiny model with random weights."""
    return Policy(make_model(len(toy_tokenizer), seed=0)).eval()


def roll(policy, tokenizer, questions, search, protocol="ur2", group_size=1, **named):
    """Calls `rollout` with an Environment that is made from the named settings."""
    how = {name: named.pop(name) for name in ("seed", "generate", "progress") if name in named}
    questions = [questions] if isinstance(questions, Question) else questions
    settings = Settings(group_size=group_size, **named)
    context = settings.max_context or context_of(policy)
    environment = Environment(tokenizer, as_protocol(protocol), search, settings, context)
    return rollout(policy, environment, questions, **how)


# ------------------------------------------------------------------------------------- a tiny run

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def traces(tokenizer, questions, protocol=PROTOCOLS["ur2"]) -> list[Example]:
    """Returns traces that search for the title of the first reference, read it and answer; a model
    that has seen no trace never searches.
    """
    begin, end = protocol.query_tags
    opens, closes = protocol.answer_tags or ("\\boxed{", "}")
    examples = []
    for question in questions:
        title, text = question.references[0].title, question.references[0].text[:40]
        found = [(f"{begin} {title}{end}", True), (frame_documents(protocol, text), False)]
        answer = (f"{opens} {question.answers[0]}{closes}", True)
        prompt = build_prompt(protocol, question, tokenizer)
        examples.append(example_of(prompt, [*found, answer], tokenizer))
    return examples


def save_searching_model(path, seed=0) -> str:
    """Saves a tiny model that was trained briefly on a few traces: it searches and often errs."""
    tokenizer = make_tokenizer(PROTOCOLS["ur2"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(model_of("qwen2", **shape(len(tokenizer), 32, 4, 64)))
    examples = traces(tokenizer, World(0).questions("train", "one_hop")[:6])
    train_sft(policy, lambda step: examples, SFTSettings(20, 2e-2))
    save_policy(policy, tokenizer, path)
    return str(path)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Returns the path of a model that searches."""
    return save_searching_model(tmp_path_factory.mktemp("start") / "model")


SMALL = """--run_name t --group_size 2 --questions_per_step 2 --steps 2 --lr 1e-3
    --max_turn_tokens 12 --max_searches 2 --documents_per_search 1 --document_tokens 40
    --trajectories_per_update 0"""


def flags(model, runs, more: str = "") -> list[str]:
    """Returns the arguments of a run that takes a second and writes into RUNS/t/stage1."""
    return ["--model", str(model), "--output_dir", str(runs), *SMALL.split(), *more.split()]


@pytest.fixture(scope="session")
def trained(model, tmp_path_factory):
    """Returns a folder of runs with both stages of the default run, started from the model that
    searches.
    """
    runs = tmp_path_factory.mktemp("trained")
    kept = shutil.copytree(model, runs / "toy" / "ur2-world0")  # so no built-in model is warmed up
    (kept / NOTE).write_text(f"{paper_of('ur2').world}\n")
    small = SMALL.replace("--run_name t", "").replace("12", "16").split()
    for stage in ("1", "2"):  # the path is added after replace(): it may contain "12"
        train.main([*small, "--stage", stage, "--output_dir", str(runs)])
    return runs


def settings_for(model, runs, more: str = "", **fields) -> Settings:
    """Returns the settings of such a run; `fields` are settings that have no flag."""
    return replace(parse(flags(model, runs, more)), **fields)


def rows_of(folder) -> list[dict]:
    """Returns the metrics of a run without the durations."""
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_end(one: Path, other: Path) -> bool:
    """Returns whether two folders of a stage have the same metrics and weights; fails if the
    optimizer states differ.
    """
    a, b = (sorted(Path(folder).glob("checkpoint-??????"))[-1] for folder in (one, other))
    states = (torch.load(path / "trainer.pt") for path in (a, b))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    weights = [(path / "model.safetensors").read_bytes() for path in (a, b)]
    return a.name == b.name and weights[0] == weights[1] and rows_of(one) == rows_of(other)


def message(call, *arguments, **named) -> str:
    """Returns the message of the InputError that the call raises, which must be one line."""
    with pytest.raises(InputError) as error:
        call(*arguments, **named)
    text = str(error.value)
    assert text and "\n" not in text
    return text


def command_line(main, arguments, capsys) -> str:
    """Runs a command that must end with exit code 2 and one line on stderr; returns this line."""
    with pytest.raises(SystemExit) as end:
        run_main(lambda: main([str(argument) for argument in arguments]))
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def of_fault(number: int, *values):
    """Returns the values of a parametrized test that injects this fault of trust/faults.md."""
    return pytest.param(*values, marks=pytest.mark.fault(number))


def threads_since(before: list[threading.Thread]) -> set[threading.Thread]:
    """Returns the threads that run now and are not in `before`, which is threading.enumerate()."""
    return {*threading.enumerate()} - {*before}


# ------------------------------------------------------------------------------------- a raw server


@contextlib.contextmanager
def nobody_listens(port: int = 0):
    """Yields a port that is bound without a listener, by default a new one: nobody else gets it."""
    with socket.socket() as held:
        # Connections of a server that used the port before may linger.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        yield held.getsockname()[1]


@pytest.fixture
def closed_port():
    with nobody_listens() as port:
        yield port


class ScriptedServer(ThreadingHTTPServer):
    """Answers each request as `script(path, payload)` says: with (status, body), with raw bytes or
    an iterable of them, or, for None, not at all. The payload of a GET is None.

    posts     (path, payload) of each POST so far
    headers   the headers of each request
    """

    request_queue_size = 128  # with the default of 5, sixteen clients at once wait or are refused

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.script, self.posts, self.headers, self.released = script, [], [], threading.Event()
        self.base = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.released.set()
        self.shutdown()
        self.server_close()


class ScriptedHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.headers.append(self.headers)
        self.answer(self.server.script(self.path, None))

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, payload))
        self.server.headers.append(self.headers)
        self.answer(self.server.script(self.path, payload))

    def answer(self, reply):
        if reply is None:  # slower than every timeout
            self.server.released.wait(60)
            return
        if isinstance(reply, tuple):
            reply = b"HTTP/1.0 %d X\r\n\r\n%b" % reply
        with contextlib.suppress(OSError):
            for raw in [reply] if isinstance(reply, bytes) else reply:
                self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture
def started():
    """Returns a function: started(server) returns the server, which the end of the test stops."""
    with contextlib.ExitStack() as stack:

        def started(server):
            stack.callback(server.stop)
            return server

        yield started


def said(content) -> bytes:
    """Returns the JSON of a reply of an OpenAI-compatible server."""
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@contextlib.contextmanager
def chat_server(answer):
    """Yields the address of an OpenAI-compatible server that replies answer(instruction, text). If
    that is None, the server replies with status 400.
    """
    lock = threading.Lock()

    def script(path, payload):
        with lock:
            reply = answer(*(message["content"] for message in payload["messages"]))
        return 400 if reply is None else 200, said(reply)

    server = ScriptedServer(script)
    yield f"{server.base}/v1#m"
    server.stop()


# ----------------------------------------------------------------- order, time limits, `make trust`

TRUST = ROOT / "tests" / "trust" / "faults.md"
injected: dict[int, dict[str, None]] = {}  # fault -> names of the tests that inject it
outcomes: dict[int, set[str]] = {}  # fault -> outcomes of the tests that ran


def pytest_addoption(parser):
    parser.addoption("--trust", action="store_true", help="print how each injected fault ended")
    shuffle = "take the files, and the tests of each file, in a random order of this seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=shuffle)


@pytest.hookimpl(tryfirst=True)  # pytest then groups the tests of a parametrised fixture
def pytest_collection_modifyitems(config, items):
    if (seed := config.getoption("shuffle")) is not None:
        rng = random.Random(seed)
        places = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], rng.random()))
    # The tests of this file share a model that takes minutes to train. One worker runs them first,
    # while another takes over the tests that come after them, so that none is idle at the end.
    items.sort(key=lambda item: "test_learning" not in item.nodeid)
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "trust", "real"))):
            item.add_marker(pytest.mark.timeout(1800))
        for number in (n for mark in item.iter_markers("fault") for n in mark.args):
            item.user_properties.append(("fault", number))
            injected.setdefault(number, {})[item.originalname] = None


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        for name, number in report.user_properties:
            if name == "fault":
                outcomes.setdefault(number, set()).add(report.outcome)


def pytest_sessionfinish(session):
    """Hands what a worker of xdist collected to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["injected"] = injected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Takes the collected faults of a worker. A worker that crashed hands over nothing, but the
    others have collected the same tests.
    """
    injected.update(getattr(node, "workeroutput", {}).get("injected", {}))


def trust_rows(table: str, injected: dict, outcomes: dict) -> Iterator[str]:
    """Yields a row for each fault (number, description, whether it ended as it should) and then the
    total. Descriptions come from tests/trust/faults.md, or else from the names of the tests.
    """
    known = re.findall(r"^\| (\d+) \| (.*?) \| ", table, re.MULTILINE)
    faults = {int(number): fault for number, fault in known}
    for number, names in injected.items():
        sentences = (name.removeprefix("test_").replace("_", " ") for name in names)
        faults.setdefault(number, "; ".join(sentences))
    passed = [number for number in faults if outcomes.get(number) == {"passed"}]
    for number, fault in sorted(faults.items()):
        bad = "failed" if "failed" in outcomes.get(number, ()) else "not run"
        yield f"{number} | {fault} | {'yes' if number in passed else bad}"
    yield f"{len(passed)} of {len(faults)} faults ended as they should"


def pytest_terminal_summary(terminalreporter, config):
    if (seed := config.getoption("shuffle")) is not None:
        terminalreporter.line(f"the order is that of seed {seed}: make test SHUFFLE={seed}")
    if config.getoption("trust"):
        for row in trust_rows(TRUST.read_text(encoding="utf-8"), injected, outcomes):
            terminalreporter.line(row)
