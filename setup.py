"""Where the packages are, which pyproject.toml cannot say; all the rest of the metadata is there."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megacore", "megacore.*"]),
        *("megacore.launch.kubernetes", "megacore.launch.monitoring"),
    ],
    # kernels/ is imported as megacore.kernels, and has no __init__.py: a package on PyPI is called `kernels`.
    # launch/ is likewise megacore.launch: its scripts are the commands of `megacore`.
    package_dir={"megacore.kernels": "kernels", "megacore.launch": "launch"},
    package_data={
        "megacore": ["py.typed"],
        "megacore.launch": ["slurm/pretrain.sbatch"],
        "megacore.launch.monitoring": ["*.json", "*.yml"],
        "megacore.tools.planner": ["errors.json", "fitted.json", "devices/*.json", "clusters/*.json"],
    },
)
