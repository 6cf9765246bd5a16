"""What each slice runs, in the order of its value, and how long each part may
take; the standard library only.
"""

from dataclasses import dataclass

HERE = "benchmarks.gpu"


@dataclass(frozen=True)
class Part:
    """A function, as ``module:function``, which takes `Rows` and `arguments`, and
    the seconds that it may take.
    """

    name: str
    seconds: int
    function: str
    arguments: tuple[str, ...] = ()
    dry: bool = True  # whether a dry run has it
    together: bool = False  # whether it may run at the same time as its neighbours: it times nothing


@dataclass(frozen=True)
class Slice:
    """Parts, and the seconds that all of them together may take."""

    title: str
    seconds: int
    parts: tuple[Part, ...]


START_UP = 30  # seconds of the first slice that its parts leave for what comes before them

# The fused operations of GPT-2.
GPT_OPERATIONS = (
    "layer_norm",
    "layer_norm with residual",
    "bias_gelu",
    "embedding_grad",
    "embedding_grad of text",
    "split_heads",
    "cross_entropy with gradient",
    "adamw",
    "sum_of_squares",
)
GPT_TESTS = (
    "test_layernorm.py",
    "test_gelu.py",
    "test_cross_entropy.py",
    "test_embedding_grad.py",
    "test_split_heads.py",
    "test_adamw.py",
    "test_grad_norm.py",
)
STEP_TESTS = (
    "test_training.py::test_a_step_equals_fp64_on_the_cpu",
    "test_training.py::test_resume_is_bitwise[false]",
)


def first_parts() -> tuple[Part, ...]:
    """What a first call on a GPU should bring back: first whether it works and computes what it
    should, with all kernels compiled at the same time; then speeds, one after the other; at the end
    the caches, for the next call. The limits leave `START_UP` seconds to install packages and import PyTorch.
    """

    def checked(name: str, function: str, *arguments: str, dry: bool = True) -> Part:
        return Part(name, 100, f"{HERE}.{function}", arguments, dry, together=True)

    return (
        checked("a step", "right:tests", *STEP_TESTS),
        checked("prepare gpt_124m", "first:fill_caches", "gpt_124m", "eager", "compiled"),
        checked("prepare gpt_1b", "first:fill_caches", "gpt_1b", "eager", "compiled", dry=False),
        checked("prepare gpt_350m", "first:fill_caches", "gpt_350m", "eager", "compiled", dry=False),
        checked("prepare plain", "first:fill_caches", "gpt_124m", "plain"),
        checked("kernels", "right:tests", *GPT_TESTS),
        checked("synchronisation", "steps:synchronisation", "gpt2", "llama", "spikes", "documents"),
        Part(
            "gpt_124m", 75, f"{HERE}.first:measure_model", ("gpt_124m", "eager", "text", "compiled", "plain")
        ),
        Part("gpt_1b", 70, f"{HERE}.first:measure_model", ("gpt_1b", "eager", "compiled"), dry=False),
        Part("gpt_350m", 55, f"{HERE}.first:measure_model", ("gpt_350m", "eager", "compiled"), dry=False),
        Part("bandwidth", 50, f"{HERE}.kernels:bandwidth", ("gpt_124m", "gpt_1b")),
        Part("attention", 40, f"{HERE}.choices:attention"),
        Part("caches", 20, f"{HERE}.caches:keep"),
    )


def speed_parts() -> tuple[Part, ...]:
    """A process for each model, compiled or not: the micro batches follow each other in it."""
    return tuple(
        Part(
            f"{config}{', compiled' if compiled == 'true' else ''}",
            seconds,
            f"{HERE}.speed:steps",
            (config, compiled),
            config == "gpt_124m",
        )
        for config, seconds in (("gpt_124m", 60), ("gpt_350m", 70), ("gpt_1b", 80))
        for compiled in ("false", "true")
    )


SLICES = {
    "first": Slice("The first call", 440, first_parts()),
    "right": Slice(
        "It computes what it should",
        420,
        (
            Part("training", 260, f"{HERE}.right:tests", ("test_training.py",)),
            Part("environment", 40, f"{HERE}.right:environment_check"),
            Part("communicator", 60, f"{HERE}.communicator:communicator"),
            Part("synchronisation", 110, f"{HERE}.steps:synchronisation"),
            Part("streams", 60, f"{HERE}.steps:streams"),
            Part(
                "tests",
                90,
                f"{HERE}.right:tests",
                ("test_staging.py", "test_main_gradient.py", "test_document_attention.py"),
            ),
        ),
    ),
    "kernels": Slice(
        "Fused kernels",
        360,
        (
            Part("tests", 150, f"{HERE}.kernels:tests"),
            Part("bandwidth", 90, f"{HERE}.kernels:bandwidth"),
            Part("in the step", 150, f"{HERE}.kernels:in_the_step"),
            Part("compute-sanitizer", 90, f"{HERE}.kernels:sanitizer"),
        ),
    ),
    "speed": Slice(
        "Training steps", 480, (*speed_parts(), Part("plain-gpt-compiled", 140, f"{HERE}.speed:beside"))
    ),
    "choices": Slice(
        "What to choose",
        300,
        (
            Part("attention", 80, f"{HERE}.choices:attention"),
            Part("products", 50, f"{HERE}.choices:products"),
            Part("shards", 50, f"{HERE}.choices:shards"),
            Part("held multiprocessors", 50, f"{HERE}.choices:held"),
            Part("predicted", 90, f"{HERE}.choices:predicted"),
        ),
    ),
}
