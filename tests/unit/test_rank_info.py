"""The rank that a process reads from its launcher's environment: a wrong one would train on
wrong data, or wait for nobody.
"""

from itertools import product
from pathlib import Path

import pytest

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.hostfile import hostfile_of
from megacore.tools.launchers import place_from_environment

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
# Rank 5 of 8, the second of four on its machine, as each launcher says it.
TORCHRUN = MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[003-007,9]",
    "SLURM_JOB_ID": "70001",
}


def test_each_launcher() -> None:
    """The same place, whoever started the process."""
    assert place_from_environment(TORCHRUN) == RankInfo(5, 8, 1, 4, "10.0.0.1", 1234)
    assert place_from_environment(DEEPSPEED) == RankInfo(5, 8, 1, 4, "10.0.0.1", 1234)
    assert place_from_environment(MPIRUN | MASTER) == RankInfo(5, 8, 1, 4, "10.0.0.1", 1234)
    assert place_from_environment(MPICH | MASTER) == RankInfo(5, 8, 1, 4, "10.0.0.1", 1234)
    assert place_from_environment(SRUN) == RankInfo(5, 8, 1, 4, "node003", 29501)
    assert place_from_environment(SRUN | MASTER) == RankInfo(5, 8, 1, 4, "10.0.0.1", 1234)


def test_no_launcher_is_one_process() -> None:
    """A Slurm batch script, which is no step, must not wait for others."""
    assert place_from_environment({}) == RankInfo(0, 1, 0, 1)
    assert place_from_environment(
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}
    ) == RankInfo(0, 1, 0, 1)


def test_torchrun_inside_slurm_or_mpirun_counts() -> None:
    """srun often starts one torchrun a machine: its ranks, not Slurm's tasks, are the ranks."""
    assert place_from_environment(SRUN | MPIRUN | TORCHRUN) == place_from_environment(TORCHRUN)


def test_mpich_inside_slurm_and_slurms_own_mpi() -> None:
    """MPICH starts its ranks from one task on each machine; srun sets MPICH's rank and size
    itself, and its tasks are the ranks.
    """
    task = SRUN | {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert place_from_environment(task | MPICH | MASTER) == place_from_environment(MPICH | MASTER)
    assert place_from_environment(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == place_from_environment(SRUN)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-007,9]", "node003"),
        ("node[9,003-007]", "node9"),
        ("a,b", "a"),
        ("gpu-a1,gpu-b[1-3]", "gpu-a1"),
        ("rack[2,5]-node[1-4]", "rack2-node1"),
        ("node[1-2]-ib,other", "node1-ib"),
        ("n1.cluster.example,n2", "n1.cluster.example"),
    ],
)
def test_first_host_of_a_slurm_nodelist(nodes: str, first: str) -> None:
    """Every rank would try to reach a host that does not exist."""
    assert place_from_environment(SRUN | {"SLURM_STEP_NODELIST": nodes}).master_address == first
    older = {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP_N")} | {
        "SLURM_STEP_NUM_TASKS": "8"
    }
    assert (
        place_from_environment(older | {"SLURM_NODELIST": nodes, "SLURM_NNODES": "2"}).master_address == first
    )


def test_one_slurm_node_needs_no_name_service() -> None:
    one = SRUN | {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_STEP_TASKS_PER_NODE": "8",
    }
    assert place_from_environment(one) == RankInfo(5, 8, 1, 8, "127.0.0.1", 29501)


@pytest.mark.parametrize(
    ("tasks", "per_node"),
    [
        ("4,3", [4, 3]),
        ("4(x2),3", [4, 4, 3]),
        ("1,2(x3),4", [1, 2, 2, 2, 4]),
        ("2,4(x2),3,4", [2, 4, 4, 3, 4]),
    ],
)
def test_slurm_nodes_with_unequal_tasks(tasks: str, per_node: list[int]) -> None:
    """The first node's number for all: a machine would serve figures of ranks that do not exist,
    and be taken for a broken one.
    """
    ranks = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    for rank, (node, local) in enumerate(ranks):
        place = {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": len(ranks),
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
        }
        env = (
            SRUN | {name: str(value) for name, value in place.items()} | {"SLURM_STEP_TASKS_PER_NODE": tasks}
        )
        assert place_from_environment(env) == RankInfo(
            rank, len(ranks), local, per_node[node], "node003", 29501
        )
    for change in (
        {"SLURM_NODEID": str(len(per_node))},
        {"SLURM_NODEID": ""},
        {"SLURM_STEP_TASKS_PER_NODE": f"{tasks},x"},
    ):
        name, value = next(iter(change.items()))
        assert f"{name}={value}" in refusal(env | change)


def refusal(env: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        place_from_environment(env)
    message = str(error.value)
    assert message.startswith("config error: environment: ") and "\n" not in message
    return message


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["two", "", "1.5"])
def test_unreadable_numbers_are_named(name: str, value: str) -> None:
    """An `int()` of it would end in a traceback on every rank."""
    message = refusal(TORCHRUN | {name: value})
    assert f"{name}={value}" in message and "torchrun" in message


GARBAGE = [
    "",
    "two",
    "1.5",
    "-1",
    "9" * 400,
    "4" * 12,
    " 4",
    "4\n",
    "²",
    "nan",
    "1e3",
    "\udcff",
    "[",
    "4(x",
    "4(x0)",
    "," * 4,
    "a..b",
]
GARBAGE += ["a" * 64, "-o"]


OWN = {
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "mpirun": MPIRUN | MASTER,
    "mpiexec": MPICH | MASTER,
    "srun": SRUN,
    "uneven srun": SRUN | {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,5"},
}


@pytest.mark.parametrize("launcher", OWN)
def test_garbage_is_refused_by_name_or_is_a_place(launcher: str) -> None:
    """A traceback on every rank, thousands of times; or a place that cannot be, which
    fails in the middle of training.
    """
    for name, value in product(OWN[launcher], GARBAGE):
        hosts = name in ("MASTER_ADDR", "SLURM_STEP_NODELIST") and (
            not value or value in ("two", "1.5", "nan", "1e3", "4" * 12)
        )
        if hosts:
            continue
        message = refusal(OWN[launcher] | {name: value})
        assert len(message) < 400, (name, value)
        assert name in message or f"rank {value} of" in message or f" of {value}" in message, (
            name,
            value,
            message,
        )


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE=0 of WORLD_SIZE=8 (the ranks on this machine, one or more and at most all)",
        ),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 of WORLD_SIZE=8"),
        ({"LOCAL_RANK": "7"}, "LOCAL_RANK=7 of LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_RANK": "3", "RANK": "2"}, "LOCAL_RANK=3 of LOCAL_WORLD_SIZE=4 on the machine of RANK=2"),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b is no host"),
        ({"MASTER_ADDR": "a" * 64 + ".b"}, "is no host (a name of labels of 1 to 63 letters"),
        ({"MASTER_ADDR": "-oProxyCommand=x"}, "is no host"),
        ({"WORLD_SIZE": "9" * 9}, f"is not from -{1 << 24} to {1 << 24}"),
    ],
)
def test_a_place_that_cannot_be_is_refused(env: dict[str, str], said: str) -> None:
    """The GPU of a local rank that there is not; no rank that reports for its machine; a name
    that Python cannot even look up.
    """
    assert said in refusal(TORCHRUN | env)


@pytest.mark.parametrize("address", ["n1", "n1.", "a_b.c-d", "10.0.0.1", "::1", "fe80::1%eth0", "x" * 63])
def test_a_host_by_name_or_address(address: str) -> None:
    assert place_from_environment(TORCHRUN | {"MASTER_ADDR": address}).master_address == address


@pytest.mark.parametrize("rank", ["8", "-1"])
def test_rank_outside_the_world(rank: str) -> None:
    assert f"rank {rank} of 8" in refusal(TORCHRUN | {"RANK": rank})


@pytest.mark.parametrize(
    "env, named",
    [
        ({"RANK": "3"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "RANK"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID=one"),
        ({"SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS"),
        (TORCHRUN | {"MASTER_PORT": "999999"}, "MASTER_PORT=999999"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_half_a_place_is_refused(env: dict[str, str], named: str) -> None:
    """Every rank would train alone, into the same folder; or fail with a traceback where the ranks meet."""
    assert named in refusal(env)


def test_mpirun_over_several_machines_needs_the_first_ones_address() -> None:
    """Ranks of the second machine would wait for a rank 0 on their own."""
    assert "mpirun -x MASTER_ADDR=" in refusal(MPIRUN)
    assert "mpiexec -genv MASTER_ADDR " in refusal(MPICH)
    assert place_from_environment(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).master_address == "127.0.0.1"


def test_hostfile_that_is_missing_is_found_out(tmp_path: Path) -> None:
    """The deepspeed launcher would only warn, and train on this machine alone."""
    (tmp_path / "here").write_text("localhost slots=2\n")
    command = ["deepspeed", "train.py", "x"]
    assert hostfile_of([*command[:1], "--hostfile", "gone", *command[1:]], tmp_path) == "gone"
    assert hostfile_of([*command[:1], "--hostfile=gone", *command[1:]], tmp_path) == "gone"
    assert hostfile_of([*command[:1], "-H", "gone", *command[1:]], tmp_path) == "gone"
    assert hostfile_of([*command[:1], "--hostfile", "here", *command[1:]], tmp_path) is None
    assert hostfile_of([*command[:1], f"--hostfile={tmp_path / 'here'}", *command[1:]], Path("/")) is None
    assert hostfile_of(command, tmp_path) is None
    assert hostfile_of([*command[:1], "--hostfile=", *command[1:]], tmp_path) is None
    assert hostfile_of(["deepspeed", "--hostfile"], tmp_path) is None  # the launcher itself complains
