"""Builds the search, models and environment of a run, and prepares its processes."""

import contextlib
import copy
import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

import ppo
from curriculum import QuestionStream
from data import Document, Documents
from engines.sampling import to_sample_with, wants_copy
from engines.server import Fleet, generate_on_server, to_serve
from engines.slots import generate_in_slots
from errors import InputError, rank_of
from flags import in_built_in_world, on_servers, stage_folder
from other_models.judge import Judge, math_grader
from other_models.llm import LLM, LocalLLM, load_llm
from other_models.reader import readings_of
from papers import PROTOCOLS, paper_of
from plumbing.files import checkpoint_to_resume, prompt_sections, starting_model
from plumbing.questions import hold_out, load_documents, training_questions
from policy import in_bf16, load_policy, make_optimizer
from prompts import Protocol
from retriever import make_retriever, make_search
from retrievers.dense import Encoder
from rewards import OtherModels, check_questions, needs, tfidf_embedder
from rollout import Environment, SearchFunction, check_prompts, context_of, generate_by_turns
from scale.lora import add_lora, check_peft
from scale.shards import asked_for, check_alike, check_shardable, shard
from settings import Settings
from summarizer import FALLBACK_TEXT, SUMMARY_LOG, make_summarizer, models_in
from trajectory import Trajectory
from update import TrainState
from world.toy import load_reader, load_toy

PATIENCE = timedelta(hours=6)  # longer than a step takes, even if its servers hardly answer
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # CPU microseconds allowed in a period, and its length


def build_protocol(settings: Settings) -> Protocol:
    """Returns the protocol with the sections of --prompt_file for the policy and the summariser. In
    the built-in world the protocol's fallback text, if it has one, is the only one that the tiny
    models know.
    """
    protocol = PROTOCOLS[settings.protocol]
    sections = prompt_sections(settings)
    shown = ("policy", "summarizer")
    own = {"prompts": {name: sections[name] for name in sections if name.startswith(shown)}}
    if protocol.fallback_text and in_built_in_world(settings):
        own["fallback_text"] = FALLBACK_TEXT
    if "notice" in sections:
        own["fallback_notice"] = sections["notice"] + "\n\n"
    return replace(protocol, **own)


def build_search(settings: Settings, documents: list, device="cpu", log="") -> SearchFunction:
    """Returns the search function, which calls the retriever and the summariser.

    log   file to which the summaries that a model writes are appended; "": none
    """
    protocol = build_protocol(settings)
    if protocol.query_tags is None:  # nothing is searched: the references come with the question
        settings = replace(settings, retriever="empty", summarizer="none")
    retriever = make_retriever(documents, settings, str(device))
    names = models_in(settings.summarizer)
    llms = {name: load_llm(name, settings, device=device) for name in sorted(names)}
    summarizer = make_summarizer(settings, protocol, llms, log)
    return make_search(retriever, summarizer, settings.documents_per_search)


def load_model(settings: Settings, path: str, device="cpu", frozen=False, in_8bit=False) -> tuple:
    """Returns (policy, tokenizer) from `path`; "" means the built-in model."""
    if path:
        return load_policy(path, device, settings, frozen, in_8bit, settings.seed)
    name = settings.toy_init
    policy, tokenizer = load_toy(
        settings.world_seed,
        PROTOCOLS[settings.protocol],
        paper_of(settings.protocol).warmed_up(name),
        settings.output_dir,
        name,
    )
    if settings.lora_rank and not frozen:
        add_lora(policy.requires_grad_(False).language_model, settings.lora_rank, settings.seed)
    return policy.to(device), tokenizer


def build_other_models(settings: Settings, documents: Documents, device) -> OtherModels:
    """Returns the other models that the reward, or DAPO's filter, asks. Each is loaded, or its
    server is probed, before the first rollout: the judge if --judge is set, reader and embedder if
    the reward needs them.
    """
    others = OtherModels()
    needed = needs(settings)
    if settings.algorithm == "dapo" and settings.filter_by == "correct":
        needed |= {"correct"}
    if judge := build_judge(settings, device):
        others.stats["judge_unreadable"] = lambda: judge.unreadable / max(1, judge.asked)
        if "correct" in needed:
            others.ask["correct"] = lambda rows: judge.verdicts(
                [(t.question, t.answer) for t in rows]
            )
        if "grade" in needed:
            others.ask["grade"] = lambda rows: [math_grader(rows, judge)] * len(rows)
    if "reader_answer" in needed:
        reader = build_reader(settings, device)
        others.stats["reader_failures"] = lambda: reader.failures
        others.ask["reader_answer"] = partial(
            readings_of, reader=reader, whole=settings.whole_reply
        )
    if "embed" in needed:
        embedder = build_embedder(settings, documents, device)
        others.ask["embed"] = lambda rows: [embedder or embedder_of_draw(rows)] * len(rows)
    return others


def build_embedder(settings: Settings, documents: Documents, device) -> Callable | None:
    """Returns an embedder (texts -> vectors). The reward of When to Search compares queries by
    their vectors: those of the encoder --embedder or, with --embedder tfidf, TF-IDF's, whose idf
    counts the documents that contain a word. Without `documents`, for example if --retriever http
    searches a corpus on another machine, returns None: each draw then has its own embedder.
    """
    if settings.embedder != "tfidf":
        return Encoder(settings.embedder, str(device))
    return tfidf_embedder(documents) if documents else None


def embedder_of_draw(rows: list[Trajectory]) -> Callable:
    """Returns TF-IDF's embedder, whose idf counts the questions and search results of a draw. A
    word that occurs in none of them has no weight.
    """
    texts = {t.question.question for t in rows}
    texts |= {search.text for t in rows for search in t.searches}
    return tfidf_embedder([Document("", "", text) for text in texts])


def build_judge(settings: Settings, device="cpu", sees: str = "") -> Judge | None:
    """Returns the judge, or None without --judge. `sees`, as Protocol.judge_sees, chooses what the
    judge reads about an open question; "" means the protocol's choice.
    """
    sees = sees or PROTOCOLS[settings.protocol].judge_sees
    if not settings.judge:
        return None
    return Judge(load_other(settings, "judge", device), sees, prompt_sections(settings))


def build_reader(settings: Settings, device="cpu") -> LLM:
    """Returns R-Search's frozen reader: --reader, or the built-in world's second tiny model."""
    if settings.reader not in ("", "built-in"):
        return load_other(settings, "reader", device)
    if settings.data:
        raise InputError(
            "--data: the built-in reader of evidence knows only its own world: give --reader"
            " http://host:port/v1#model or a HF model, or --variant without_evidence"
        )
    policy, tokenizer = load_reader(settings.world_seed, settings.output_dir)
    return LocalLLM(
        policy.to(device),
        tokenizer,
        max_tokens=8,
        batch_size=256,
        name=f"reader-world{settings.world_seed}",
    )


def load_other(settings: Settings, name: str, device) -> LLM:
    """Returns the model of --judge or --reader, with its section of --prompt_file."""
    instruction = prompt_sections(settings).get(name, "")  # before loading, because this may raise
    llm = load_llm(getattr(settings, name), settings, device=device)
    llm.instruction = instruction
    return llm


def build_environment(
    settings: Settings,
    tokenizer,
    search: SearchFunction,
    policy,
    training: bool = False,
) -> Environment:
    environment = Environment(
        tokenizer,
        build_protocol(settings),
        search,
        settings,
        settings.max_context or context_of(policy),
    )
    environment.training = training
    return environment


def choose_generate(settings: Settings):
    """Returns the function that samples trajectories: on servers, by HF `generate`, or in slots."""
    if on_servers(settings):
        return generate_on_server
    return generate_by_turns if settings.engine == "hf" else generate_in_slots


def make_accelerator(settings: Settings) -> Accelerator:
    """Returns the accelerator. A process that waits for another gives up after PATIENCE."""
    if settings.report_to and settings.report_to not in map(str, get_available_trackers()):
        raise InputError(f"--report_to {settings.report_to}: pip install {settings.report_to}")
    return Accelerator(
        mixed_precision="no",  # policy.py asks for bf16 arithmetic itself
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PATIENCE),
            # Without bucket views DDP keeps a second copy of all gradients.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
        log_with=settings.report_to or None,
        project_dir=stage_folder(settings),
    )


# ------------------------------------------------------------------------------------- processes
def check_processes(processes: int) -> None:
    """Raises an InputError if the processes have not found each other: on CPUs, each process that
    torchrun starts would otherwise train alone.
    """
    started = rank_of("WORLD_SIZE", 1)
    if started != processes:
        raise InputError(
            f"{started} processes were started and {processes} take part: set "
            "ACCELERATE_USE_CPU=true, or start one"
        )


def set_threads() -> None:
    """Shares the cores among the processes of this machine. The number of threads changes the last
    digits of the results, so it does not depend on the machine's load.

    Trap: `torchrun` and `accelerate launch` set OMP_NUM_THREADS too, often to 1, so only a process
    that was started without them takes the user's own number.
    """
    launched = {"LOCAL_WORLD_SIZE", "ACCELERATE_DYNAMO_BACKEND"} & os.environ.keys()
    if launched or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // rank_of("LOCAL_WORLD_SIZE", 1)))


def usable_cores() -> int:
    """Returns the number of cores that this process may use, by affinity and container quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or the quota is "max": no limit
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def spread_over(accelerator: Accelerator, sharding: str, optimizer: str, module, lr: float):
    """Returns (the module that an update calls, its optimizer). With DDP every process holds all
    weights; with any other `sharding` each process holds a part.
    """
    if sharding != "ddp":
        model = shard(module, sharding, accelerator.num_processes)
    else:
        if accelerator.num_processes > 1:
            for weight in module.parameters():
                if weight.requires_grad:
                    # DDP makes this gradient a view of its bucket, so there is no second copy.
                    weight.grad = torch.zeros_like(weight)
        model = accelerator.prepare_model(module)
    return model, make_optimizer(module, optimizer, lr)


# --------------------------------------------------------------------------------- the whole state
def build_state(settings: Settings) -> TrainState:
    """Builds everything that a stage needs. Checks that need no model come first."""
    accelerator = make_accelerator(settings)
    device = accelerator.device
    set_threads()
    check_processes(accelerator.num_processes)
    sharding = asked_for() if accelerator.num_processes > 1 else "ddp"
    if sharding != "ddp":
        check_shardable(settings.optimizer, settings.lora_rank)
    start = checkpoint_to_resume(settings) if settings.resume else starting_model(settings)
    prompt_sections(settings)  # raises an error if the file has a fault
    if settings.lora_rank:
        check_peft(settings.lora_rank)
    questions = check_questions(training_questions(settings), settings)
    begin = "going on from" if settings.resume else f"stage {settings.stage} starts from"
    accelerator.print(begin, start or "the built-in model")
    trained_on, held_out = hold_out(questions, settings)
    attempts = 1 + settings.max_resample * (settings.algorithm == "dapo")
    QuestionStream(trained_on, settings, attempts)  # a wrong --mix is an error before a model loads

    documents = load_documents(settings, questions)
    log = "" if settings.dry_run else Path(settings.output_dir, SUMMARY_LOG)
    # This may encode for hours: in `local_main_process_first` the waiting processes would time out.
    search = build_search(replace(settings, fallback=True), documents, device, log)
    in_8bit = settings.load_in_8bit and settings.lora_rank > 0
    # A resumed LoRA run loads the weights that it began with; trainer.pt has the trained adapters.
    path = starting_model(settings) if settings.lora_rank else start
    with accelerator.local_main_process_first():  # the first process makes the built-in models
        policy, tokenizer = load_model(settings, path, device, in_8bit=in_8bit)
        main = accelerator.is_main_process
        others = build_other_models(settings, documents, device) if main else None
    check_alike(policy, os.path.basename(start) if settings.resume else "")
    environment = build_environment(settings, tokenizer, search, policy, training=True)
    held_out = check_prompts(held_out, environment, policy, settings.skip_bad)
    trained_on = check_prompts(trained_on, environment, policy, settings.skip_bad)
    state = TrainState(
        settings,
        accelerator,
        policy,
        model=None,
        optimizer=None,
        recompute=False,
        start=start,
        environment=environment,
        other_models=others,
        held_out=held_out,
        stream=QuestionStream(trained_on, settings, attempts),
    )
    choose_sampler(state, in_8bit)
    if settings.kl_coef and not settings.lora_rank:  # with LoRA π_ref is the policy without it
        path = starting_model(settings)
        reference, _ = load_model(settings, path, device, True, settings.load_in_8bit)
        state.reference = reference.eval().requires_grad_(False)
    spread = partial(spread_over, accelerator, sharding, settings.optimizer)
    if settings.algorithm == "ppo":  # a new critic in each stage: another reward has other values
        state.critic = ppo.Critic(copy.deepcopy(policy.language_model.base_model))
        state.critic_model, state.critic_optimizer = spread(state.critic, settings.critic_lr)
    state.model, state.optimizer = spread(policy, settings.lr)
    return state


def choose_sampler(state: TrainState, in_8bit: bool) -> None:
    """Sets how trajectories are sampled, and whether π_old's log-probs must be computed again."""
    settings = state.settings
    policy = state.policy
    device = state.accelerator.device
    copies = wants_copy(device, in_8bit)
    served = on_servers(settings)
    state.generate = choose_generate(settings)
    state.sampler = lambda: to_sample_with(policy, copies)
    if served:
        policy.fleet = Fleet(policy, state.environment)
        if state.accelerator.is_main_process:
            policy.fleet.check()
        state.sampler = lambda: to_serve(policy, state.version)
    state.recompute = in_bf16(device) or copies or served or not settings.mask_documents
    state.mismatch = settings.mismatch
    if state.mismatch == "auto":
        # No correction if documents are trained on: they have no log-probs of the sampler.
        state.mismatch = "token" if state.recompute and settings.mask_documents else "none"
