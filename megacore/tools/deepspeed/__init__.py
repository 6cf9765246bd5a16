"""DeepSpeed as an engine: ZeRO stages 0 to 3 behind the core's seam (`engine.protocol.Engine`), with
megacore's mesh and checkpoints.

In: stages and a ds_config. Out: what every engine gives. Importing `engine` attaches it; `choices` does so
for every run.
"""
