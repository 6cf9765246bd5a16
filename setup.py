"""Where the packages are, which pyproject.toml cannot say; all the rest of the metadata is there."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["megacore", "megacore.*"]),
    # kernels/ is imported as megacore.kernels, and has no __init__.py: a package on PyPI is called `kernels`.
    package_dir={"megacore.kernels": "kernels"},
    package_data={
        "megacore": ["py.typed"],
        "megacore.tools.planner": ["errors.json", "fitted.json", "devices/*.json", "clusters/*.json"],
    },
)
