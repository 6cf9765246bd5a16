"""The generated pages of the documentation, and the generated blocks in pages that people write.

python -m tests.pages            writes all of them
python -m tests.pages --check    compares them with the files, and fails if one is stale
"""
