"""Packaging: `pip install -c requirements.txt -e .` installs the tested versions,
`pip install .` any in these ranges.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Models of model.hf are computed by transformers' classes, whose interfaces move: these releases are tested.
# Models from and to its format are compared with it.
HF = ["huggingface_hub>=1.0", "tokenizers>=0.21", "transformers>=5.17,<5.24"]

setup(
    name="megacore",
    version="0.1.0",
    description="GPT pretraining over named parallel axes, written to be read, changed and proved",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8")
    if (ROOT / "README.md").is_file()
    else "",
    long_description_content_type="text/markdown",
    author="megacore contributors",
    license="MIT",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megacore", "megacore.*"]),
        *("megacore.launch.kubernetes", "megacore.launch.monitoring"),
    ],
    # kernels/ is imported as megacore.kernels, and has no __init__.py: a package on PyPI is called `kernels`.
    # launch/ is likewise megacore.launch: its scripts are the commands of `megacore`.
    package_dir={"megacore.kernels": "kernels", "megacore.launch": "launch"},
    package_data={
        "megacore.launch": ["slurm/pretrain.sbatch"],
        "megacore.launch.monitoring": ["*.json", "*.yml"],
        "megacore.tools.planner": ["errors.json", "fitted.json", "devices/*.json", "clusters/*.json"],
    },
    entry_points={"console_scripts": ["megacore = megacore.__main__:main"]},
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",  # tools/deepspeed touches private names of it
        "einops>=0.8",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "pydantic>=2.10",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "sentencepiece>=0.2",
        "tensorboard>=2.16",
        "xxhash>=3",
    ],
    extras_require={
        # GPU builds of torch bring the Triton they were made for, from 3.6 with torch 2.11 on. Alone it
        # serves the kernels' tests on a CPU, where 3.6's interpreter needs numpy < 2.4.
        "triton": ["triton>=3.6; platform_system == 'Linux'"],
        "test": [
            *(
                "mypy>=1.15",
                "pytest>=8",
                "pytest-xdist>=3.6",
                "ruff>=0.11",
                *HF,
            ),
            *(
                "kubernetes-validate>=1.31",
                "prometheus-client>=0.20",
                "pyarrow>=18",
                "pyyaml>=6",
                "tiktoken>=0.9",
            ),
            "triton>=3.6; platform_system == 'Linux'",
        ],
        "hf": HF,
        # What launch/prepare.py reads besides text: tables and Zstandard through pyarrow, the hub's data sets
        # through datasets, OpenAI's tokenizers by name through tiktoken; launch/instructlab.py reads YAML.
        "datasets": ["datasets>=4", "pyarrow>=18", "pyyaml>=6", "tiktoken>=0.9", "tokenizers>=0.21"],
        "benchmark": ["transformers>=4.56"],
        "kubernetes": ["pyyaml>=6"],
        "monitoring": ["prometheus-client>=0.20", "nvidia-ml-py>=12; platform_system == 'Linux'"],
        "wandb": ["wandb>=0.19"],
        "ray": ["ray[default,train]>=2.60"],
    },
)
