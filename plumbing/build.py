"""Builds what settings name, for training as for evaluation: search, models, processes."""

import contextlib
import copy
import ctypes
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.distributed.distributed_c10d import _get_default_store

import ppo
from curriculum import QuestionStream
from data import Document
from errors import InputError, raise_terminated, rank_of
from flags import frozen_in_8bit, on_servers
from other_models.judge import Judge, math_grader, verdicts_on
from other_models.llm import LLM, RETRIES, THREADS, LocalLLM, load_llm
from other_models.reader import readings_of
from papers import paper_of
from plumbing.files import prompt_sections, starting_model
from plumbing.questions import hold_out, load_documents, training_questions
from policy import Policy, load_policy, make_optimizer
from prompts import PROTOCOLS, Protocol
from retriever import make_retriever, make_search
from retrievers.dense import Encoder
from rewards import OtherModels, check_questions, tfidf_embedder
from rollout import (
    Environment,
    SearchFunction,
    check_prompts,
    context_of,
    generate_by_turns,
    start_thread,
)
from scale.engine import generate_in_slots
from scale.lora import add_lora, check_peft
from scale.sampling import to_sample_with, wants_copy
from scale.server import SLOWEST, Fleet, generate_on_server, to_serve
from scale.shards import asked_for, check_alike, check_shardable, shard
from settings import Settings, asked_of_others, in_built_in_world, stage_folder
from summarizer import FALLBACK_TEXT, SUMMARY_LOG, make_summarizer, models_in
from trajectory import Trajectory
from update import TrainState, updates_of
from world.toy import load_reader, load_toy

PR_SET_PDEATHSIG = 1  # prctl(2)
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of all cores in a period, and the period
PATIENCE = 60  # seconds: who waits longer for another process says for which
LAUNCHERS = (b"accelerate", b"torchrun", b"torch.distributed", b"lab.ablate")


def build_protocol(settings: Settings) -> Protocol:
    """With what --prompt_file has for the policy and its summariser, and the fallback's words: of
    the built-in world, and for the tiny models wherever they search, the one that they know.
    """
    protocol, sections = PROTOCOLS[settings.protocol], prompt_sections(settings)
    prompts = {k: text for k, text in sections.items() if k.startswith(("policy", "summarizer"))}
    elsewhere = settings.data or settings.corpus or settings.retriever == "http"
    tiny = not elsewhere or in_built_in_world(settings)
    shown = protocol.fallback_text and (FALLBACK_TEXT if tiny else protocol.fallback_text)
    return dataclasses.replace(protocol, prompts=prompts, fallback_text=shown)


def build_search(
    settings: Settings, documents: list, device="cpu", log="", protocol: Protocol | None = None
) -> SearchFunction:
    """Retriever and summariser. log: in training, where a model's notes are kept. protocol: where
    it is not that of the settings.
    """
    protocol = protocol or build_protocol(settings)
    if protocol.query_tags is None:  # the references come with the question
        settings = dataclasses.replace(settings, retriever="empty", summarizer="none")
    how = (settings.seed, settings.timeout, str(device), settings.output_dir)
    retriever = make_retriever(documents, settings, *how)
    names = sorted(models_in(settings.summarizer))
    llms = {name: load_llm(name, settings, device=device) for name in names}
    summarizer = make_summarizer(settings, protocol, llms, log)
    search = make_search(retriever, summarizer, settings.documents_per_search)
    if llms:  # each model is allowed all its tries of every request, too
        bound, tries = getattr(search, "seconds", lambda _: 0.0), (RETRIES + 1) * settings.timeout

        def seconds(some: list) -> float:
            return bound(some) + sum(-(-len(some) // llm.at_once) for llm in llms.values()) * tries

        search.seconds = seconds
    return search


def load_model(settings: Settings, path: str, device="cpu", frozen=False, in_8bit=False) -> tuple:
    """(policy, tokenizer) from `path`, or the built-in ones where it is ""."""
    if path:
        return load_policy(path, device, settings, frozen, in_8bit, settings.seed)
    protocol, name = PROTOCOLS[settings.protocol], settings.toy_init
    tiny = paper_of(settings.protocol).warmed_up(name)
    policy, tokenizer = load_toy(settings.world_seed, protocol, tiny, settings.output_dir, name)
    if settings.lora_rank and not frozen:
        add_lora(policy.requires_grad_(False).language_model, settings.lora_rank, settings.seed)
    return policy.to(device), tokenizer


def build_other_models(settings: Settings, documents: list[Document], device) -> OtherModels:
    """Whom a step's rewards ask. A model is loaded, or its server probed, before the first rollout,
    and only if the reward has a use for it.
    """
    others, needed = OtherModels(), asked_of_others(settings)
    if judge := build_judge(settings, device):
        others.stats["judge_unreadable"] = lambda: judge.unreadable / max(1, judge.asked)
        if "verdict" in needed:
            others.verdicts = partial(verdicts_on, judge=judge)
        if "grade" in needed:
            others.grader = partial(math_grader, judge=judge)
    if "reader" in needed:
        reader = build_reader(settings, device)
        others.stats["reader_failures"] = lambda: reader.failures
        others.readings = partial(readings_of, reader=reader, whole=settings.whole_reply)
    if "embedder" in needed:
        others.embedder = build_embedder(settings, documents, device)
    return others


def build_embedder(settings: Settings, documents: list[Document], device) -> Callable:
    """(a step's trajectories) -> (queries -> vectors), for When to Search's similarity. Over http
    nobody has the corpus: then a word counts that the step asked for or found, and another one was
    invented.
    """
    embed = None
    if settings.embedder != "tfidf":
        embed = Encoder(settings.embedder, str(device))
    elif documents:
        embed = tfidf_embedder(documents)

    def embedder(rows: list[Trajectory]):
        if embed:
            return embed
        texts = {t.question.question for t in rows}
        texts |= {search.text for t in rows for search in t.searches}
        return tfidf_embedder([Document("", "", text) for text in texts])

    return embedder


def load_other(settings: Settings, name: str, device="cpu") -> LLM:
    """The model of --judge or --reader, told what --prompt_file has for it."""
    instruction = prompt_sections(settings).get(name, "")  # before a model is loaded
    llm = load_llm(getattr(settings, name), settings, device=device)
    llm.instruction = instruction
    return llm


def build_judge(settings: Settings, device="cpu", sees: str = "") -> Judge | None:
    """sees: what the judge sees of a question, one of JUDGE_SEES; "" is the protocol's choice."""
    sees = sees or PROTOCOLS[settings.protocol].judge_sees
    return Judge(load_other(settings, "judge", device), sees) if settings.judge else None


def build_reader(settings: Settings, device="cpu") -> LLM:
    """R-Search's frozen reader: --reader, or the built-in world's second tiny model."""
    if settings.reader and settings.reader != "built-in":
        return load_other(settings, "reader", device)
    if settings.data:
        how = "give --reader http://host:port/v1#model or a HF model, or --variant without_evidence"
        raise InputError(f"--data: the built-in reader of evidence knows only its own world: {how}")
    policy, tokenizer = load_reader(settings.world_seed, settings.output_dir)
    name = f"reader-world{settings.world_seed}"
    return LocalLLM(policy.to(device), tokenizer, max_tokens=8, batch_size=256, name=name)


def build_environment(
    settings: Settings, tokenizer, search: SearchFunction, policy, kind=Environment
) -> Environment:
    context = settings.max_context or context_of(policy)
    return kind(tokenizer, build_protocol(settings), search, settings, context)


def choose_generate(settings: Settings):
    """Slots; plain `generate`: the page to read, and the twin to compare with; or servers."""
    if on_servers(settings):
        return generate_on_server
    return generate_by_turns if settings.engine == "hf" else generate_in_slots


def make_accelerator(settings: Settings) -> Accelerator:
    """Processes wait for each other: as long as all searches of one may take, and half an hour."""
    rows = max(settings.questions_per_step * settings.group_size, settings.eval_questions)
    asks = settings.judge or settings.reader or models_in(settings.summarizer)
    rounds = 4 + bool(asks) * rows // THREADS
    if on_servers(settings):  # the turns on a server that does not answer
        rounds += settings.max_turn_tokens * SLOWEST / settings.timeout
    searching = (settings.max_searches + 1) * rounds * (RETRIES + 1) * settings.timeout
    if settings.report_to and settings.report_to not in map(str, get_available_trackers()):
        raise InputError(f"--report_to {settings.report_to}: pip install {settings.report_to}")
    limit = InitProcessGroupKwargs(timeout=timedelta(minutes=30, seconds=searching))
    # Without bucket views DDP keeps a second copy of all gradients.
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    tracker = {"log_with": settings.report_to or None, "project_dir": stage_folder(settings)}
    return Accelerator(kwargs_handlers=[limit, views], **tracker)


def wait_for_all(state: TrainState, doing: str) -> None:
    """Waits until all processes are here; after PATIENCE seconds a line names one that is missing.

    Trap: a collective waits in C++, where Python runs no handler of a signal. So a thread waits in
    it, and the main thread for the thread. SIGTERM ends the first process at once; another one has
    to give the others PATIENCE seconds, in which the step may still be finished and saved.
    """
    if state.accelerator.num_processes == 1:
        return
    store, me, failed = _get_default_store(), state.accelerator.process_index, []
    before = (me or state.accelerator.num_processes) - 1

    def arrive() -> None:
        store.add(f"meetings of {me}", 1)
        state.accelerator.wait_for_everyone()

    def name_missing() -> None:  # each looks after the one before it: at least one has a reason
        if store.add(f"meetings of {before}", 0) < store.add(f"meetings of {me}", 0):
            said = f"waiting for process {before}, which {doing} or does not answer"
            print(f"{said} ({PATIENCE} s so far)", file=sys.stderr)

    thread, waited, heard = start_thread(arrive, failed.append), 0, 0
    while thread.join(1) or thread.is_alive():  # a handler of a signal runs within `join`
        waited += 1
        heard += bool(getattr(state.run, "ended", ()))
        if waited == PATIENCE:  # in a thread: if the store is stopped, too, it does not answer
            start_thread(name_missing, [].append)
        if heard > PATIENCE:
            raise_terminated(*state.run.ended)
    for error in filter(None, failed):
        raise error


def check_processes(known: int) -> None:
    """Trap: on CPUs torchrun's processes do not find each other; each would train alone."""
    started = rank_of("WORLD_SIZE", 1)
    if started != known:
        said = f"{started} processes were started and {known} take part"
        raise InputError(f"{said}: set ACCELERATE_USE_CPU=true, or start one")


def set_threads() -> None:
    """Shares the cores among the processes of this machine. The load decides nothing: another
    number of threads gives other digits. A user's own OMP_NUM_THREADS wins.

    Trap: launchers set it, too. `torchrun` sets 1, `accelerate launch` 1 or all cores, and a CPU
    run would then use one core, or all of them in every process.
    """
    processes, asked = rank_of("LOCAL_WORLD_SIZE", 1), os.environ.get("OMP_NUM_THREADS")
    launched = {"LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
    launchers = ("1", str((psutil.cpu_count(logical=False) or 1) // processes))
    if not asked or (launched and asked in launchers):
        torch.set_num_threads(max(1, usable_cores() // processes))


def usable_cores() -> int:
    """The cores that this process is bound to, and no more than the quota of its container."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # not Linux; "max" is no limit
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def same_numbers() -> None:
    """--deterministic. On a CPU they are the same anyway; what a GPU cannot do so is warned of."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def end_with_launcher() -> None:
    """Trap: kill -9 of a launcher leaves its processes training unseen. Linux can tell them."""
    with contextlib.suppress(OSError, AttributeError):
        started_by = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if any(name in started_by for name in LAUNCHERS):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def check_before_models(settings: Settings, accelerator: Accelerator) -> tuple:
    """Refuses what can be found wrong without a model. Returns how weights are spread over the
    processes, where they come from, all questions, those to train on and those held out.
    """
    processes = accelerator.num_processes
    check_processes(processes)
    sharding = asked_for() if processes > 1 else "ddp"
    if sharding != "ddp":
        check_shardable(settings.optimizer, settings.lora_rank)
    start, said = starting_model(settings)
    prompt_sections(settings, strict=True)
    if settings.lora_rank:
        check_peft(settings.lora_rank)
    questions = check_questions(training_questions(settings), settings)
    check_shares(settings, processes)
    accelerator.print(said)
    return sharding, start, questions, *hold_out(questions, settings)


def build_state(settings: Settings) -> TrainState:
    """Everything one stage needs. What is quick to find wrong comes first, the models last."""
    accelerator, dapo = make_accelerator(settings), settings.algorithm == "dapo"
    device, main = accelerator.device, accelerator.is_main_process
    end_with_launcher()
    if settings.deterministic:
        same_numbers()
    set_threads()
    found = check_before_models(settings, accelerator)
    sharding, start, questions, trained_on, held_out = found
    stream = QuestionStream(trained_on, settings, 1 + dapo * settings.max_resample)
    documents = load_documents(settings, questions)
    # Not under the barrier below: vectors of a large corpus take hours.
    log = "" if settings.dry_run else str(Path(settings.output_dir, SUMMARY_LOG))
    asked = dataclasses.replace(settings, fallback=True)  # queries are turned away
    search = build_search(asked, documents, device, log)
    in_8bit, served = "base" in frozen_in_8bit(settings), on_servers(settings)
    # A resumed LoRA run loads its first weights: what was learned lies beside the sum.
    path = first_model(settings) if settings.lora_rank else start
    with accelerator.local_main_process_first():  # one process makes the built-in models
        policy, tokenizer = load_model(settings, path, device, in_8bit=in_8bit)
        others = build_other_models(settings, documents, device) if main else None
    check_alike(policy, os.path.basename(start) if settings.resume else "")
    environment = build_environment(settings, tokenizer, search, policy)
    check_prompts([*trained_on, *held_out], environment, policy)
    if main:
        hint_at_summaries(settings)
    if served:
        policy.fleet = Fleet(policy, environment)
    copies = wants_copy(settings.sampling_copy, device, in_8bit)
    recompute = device.type != "cpu" or copies or served or not settings.mask_documents
    # "auto" without mask_documents: trained documents were not sampled and have no ρ.
    auto = "token" if recompute and settings.mask_documents else "none"
    mismatch = auto if settings.mismatch == "auto" else settings.mismatch

    def sampler():
        return to_serve(policy, state.version) if served else to_sample_with(policy, copies)

    reference = load_reference(settings, device)
    spread = partial(spread_over, accelerator, sharding, settings.optimizer)
    critic = make_critic(settings, policy)
    critic_model, critic_optimizer = spread(critic, settings.critic_lr) if critic else (None, None)
    model, optimizer = spread(policy, settings.lr)
    state = TrainState(
        settings, accelerator, policy, model, optimizer, recompute, mismatch, reference, critic,
        critic_model, critic_optimizer, stream, held_out, environment, choose_generate(settings),
        sampler, others,
    )  # fmt: skip
    return state


def make_critic(settings: Settings, policy: Policy) -> ppo.Critic | None:
    """Returns PPO's critic, a new one in each stage: another reward has other values."""
    if settings.algorithm == "ppo":
        return ppo.Critic(copy.deepcopy(policy.language_model.base_model))


def hint_at_summaries(settings: Settings) -> None:
    """UR² on own data, where nobody summarises: its Table 6 and section 6.1."""
    if settings.data and settings.reward.startswith("ur2") and settings.summarizer == "none":
        lost = "open questions lost up to 2 points of F1, and multiple choice stopped searching"
        print(f"--summarizer none: no search can fall back; in UR² {lost}", file=sys.stderr)


def check_shares(settings: Settings, processes: int) -> None:
    per_step = settings.questions_per_step * settings.group_size
    least = per_step // updates_of(per_step, settings)
    if least < processes:
        said = f"{least} trajectories per update cannot be shared by {processes}"
        raise InputError(f"{said} processes: raise --trajectories_per_update")


def spread_over(accelerator: Accelerator, sharding: str, optimizer: str, module, lr: float):
    """(what an update calls, its optimizer): all weights on every process, or a part on each."""
    if sharding != "ddp":
        model = shard(module, sharding, accelerator.num_processes)
    else:
        if accelerator.num_processes > 1:
            for weight in filter(lambda weight: weight.requires_grad, module.parameters()):
                weight.grad = torch.zeros_like(weight)  # DDP makes a view of its bucket of it
        model = accelerator.prepare_model(module)
    return model, make_optimizer(module, optimizer, lr)


def first_model(settings: Settings) -> str:
    """The model this stage began with, also in a resumed run."""
    return starting_model(dataclasses.replace(settings, resume=False))[0]


def load_reference(settings: Settings, device) -> Policy | None:
    """π_ref: the model this stage began with, frozen. With LoRA it is the policy's own base."""
    if not settings.kl_coef or settings.lora_rank:
        return None
    in_8bit = "reference" in frozen_in_8bit(settings)
    reference, _ = load_model(settings, first_model(settings), device, True, in_8bit)
    return reference.eval().requires_grad_(False)
