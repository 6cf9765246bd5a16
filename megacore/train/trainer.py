"""The training loop, from a checked config and a mesh to a trained model."""

from pathlib import Path

import torch
import torch.distributed as dist

from megacore import checkpoint
from megacore.checkpoint.weights import WEIGHTS
from megacore.comm import all_reduce, broadcast_text
from megacore.config import Config
from megacore.engine.choose import build_engine
from megacore.engine.optimizer import learning_rate
from megacore.engine.protocol import StepStatistics
from megacore.mesh import Mesh
from megacore.model.gpt import Stage
from megacore.pipeline import schedule
from megacore.pipeline.partition import stage_layers
from megacore.pipeline.runtime import Runtime
from megacore.tensor_parallel.shard import logical_name
from megacore.train.evaluation import evaluate
from megacore.train.inputs import Inputs
from megacore.train.loader import Loader
from megacore.train.logs import Logs
from megacore.train.meters import StepTimer, Utilisation, peak_memory
from megacore.train.stopping import StopRequest

FINISHED, STOPPED = 0, 75  # exit statuses; 75 asks a scheduler to start the job again


class Trainer:
    """One rank's part in a run. Construction and every method are collective over all ranks."""

    def __init__(self, config: Config, mesh: Mesh, inputs: Inputs) -> None:
        self.config, self.mesh, self.inputs = config, mesh, inputs
        self.is_writer = mesh.place.rank == 0
        assert config.log.dir is not None
        self.checkpoints = Path(config.log.dir) / "checkpoints"

        layers = stage_layers(config)[mesh.pp_rank]
        self.stage = Stage(config, layers, mesh.tp, mesh.device)
        self.engine = build_engine(config, self.stage, mesh)
        self.runtime = Runtime(self.stage, self.engine, mesh.pp)
        self.plan = schedule.build(
            config.parallel.schedule, mesh.pp.size, config.num_microbatches, config.parallel.chunks, tied=config.model.tie_embeddings
        )
        self.loader = Loader(config, mesh, inputs.stream)
        self.latest: Path | None = None  # the newest checkpoint saved or resumed from
        self.origin: Path | None = None  # the checkpoint that gave the first weights
        self.step = self.started = self.resume()
        self.logs = Logs(config, self.is_writer, self.step + 1)
        self.utilisation = Utilisation(config, mesh.device, mesh.place.world_size)

    def run(self) -> int:
        """Trains from the step after the last checkpoint's to `train.steps`; returns the exit status."""
        try:
            status = self.train()
            self.engine.settle()
            return status
        finally:
            self.logs.close()  # gives the terminal back: a failure's reason comes last

    def train(self) -> int:
        """The loop."""
        config, train = self.config, self.config.train
        self.greet()
        timer = StepTimer()
        with StopRequest() as stop:
            while self.step < train.steps:
                self.step += 1
                lr = learning_rate(config.optim, self.step, train.steps)
                loss = self.forward_backward()
                statistics = self.engine.step(lr)
                timer.step()

                # Everything below the next line waits for the device, so it happens on few steps.
                done = self.step == train.steps
                stopping = False
                if self.step % config.log.every == 0 or done:
                    stopping = self.report(loss, statistics, lr, timer, stop.requested) and not done
                every = config.checkpoint.every
                evaluating = train.eval_every and self.step % train.eval_every == 0 and not done and not stopping
                saving = (every and (self.step % every == 0 or done)) or stopping
                if evaluating or saving:
                    aside = timer.now(self.mesh.device)
                    if evaluating:
                        self.validate()
                    if saving:
                        self.save()
                    timer.exclude(timer.now(self.mesh.device) - aside)
                if stopping:
                    self.logs.say(f"stopped on request after step {self.step}; the same command goes on from there")
                    return STOPPED
        self.conclude()
        return FINISHED

    def forward_backward(self) -> torch.Tensor:
        """Runs the microbatches of the current step, forward and backward; gradients are then with the engine, reduced.

        Returns this rank's share of the global batch's mean loss: shares add up to it over the world. fp64, on the device.
        """
        train = self.config.train
        target_weight = 1.0 / (train.global_batch_size * train.seq_len)
        loss = self.runtime.run(self.plan, self.loader.step(self.step), target_weight) * target_weight
        # Only the last stage has losses, and each of its tensor ranks has the same.
        return loss.double() if self.mesh.tp_rank == 0 else torch.zeros_like(loss, dtype=torch.float64)

    def greet(self) -> None:
        """What is about to run, in a few lines."""
        config, train = self.config, self.config.train
        data = self.mesh.dp.size
        parameters = sum(p.numel() for p in self.stage.parameters())
        self.logs.say(f"mesh: {self.mesh.describe()}")
        self.logs.say(
            f"batch: global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
            f" × microbatches {config.num_microbatches} × data {data}"
        )
        layers = stage_layers(config)[0]
        self.logs.say(f"rank 0 holds layers {layers.start}–{layers.stop - 1}, {parameters:,} parameters in {train.precision}")
        if self.step == train.steps:
            self.logs.say(f"all {train.steps} steps are done already (checkpoint.resume=never trains anew)")
        elif self.step:
            self.logs.say(f"resumed after step {self.step} of {train.steps}")
        elif self.origin:
            self.logs.say(f"starting from the weights of {self.origin}")

    def report(self, loss: torch.Tensor, statistics: StepStatistics, lr: float, timer: StepTimer, stop_requested: bool) -> bool:
        """Logs a step, and agrees on whether to stop. `loss` is this rank's share of the global mean."""
        # Sums, then maxima; the norm and the skips are already the same on every rank.
        shares = all_reduce(torch.stack([loss, torch.full_like(loss, float(stop_requested))]), self.mesh.world)
        # Synchronises: from here the device has done the step, and the clock can be read.
        loss_value, stops, grad_norm, skipped = torch.cat([shares, torch.stack([statistics.grad_norm, statistics.skipped])]).tolist()
        seconds = timer.read()
        own = torch.tensor([seconds, peak_memory(self.mesh.device)], dtype=torch.float64, device=self.mesh.device)
        seconds, memory = all_reduce(own, self.mesh.world, dist.ReduceOp.MAX).tolist()
        tokens_a_step = self.config.train.global_batch_size * self.config.train.seq_len
        speed = tokens_a_step / seconds
        self.logs.step(
            {
                "step": self.step,
                "loss": loss_value,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens": self.step * tokens_a_step,
                "tokens_per_second": speed,
                "step_seconds": seconds,
                "mfu": self.utilisation.full(speed),
                "mfu_causal": self.utilisation.causal(speed),
                "memory_bytes": int(memory),
                "skipped": int(skipped),
            }
        )
        return stops > 0

    def validate(self) -> float | None:
        """The mean loss over the validation set (or `eval_batches` of it), in nats a token; None without one."""
        if self.inputs.validation is None:
            return None
        loss = evaluate(self.config, self.runtime, self.mesh, self.inputs.validation).loss
        if self.step > self.started:  # else it is on record already
            self.logs.validation(self.step, loss)
        self.logs.say(f"step {self.step}: validation loss {loss:.4f}")
        return loss

    def conclude(self) -> None:
        """The last validation, and what a person wants to know at the end."""
        loss = self.validate()
        if loss is not None:
            entropy = self.inputs.unigram_entropy()
            beside = "" if entropy is None else f"; {entropy:.4f} for a model that knows only how frequent each token is"
            self.logs.say(f"final validation loss {loss:.4f} nats a token{beside}")
        if self.latest is not None:
            self.logs.say(f"checkpoint: {self.latest}")
        self.logs.say(f"records: {self.config.log.dir}/metrics.jsonl, and tensorboard --logdir {self.config.log.dir}")

    def save(self) -> None:
        """Writes a checkpoint of the step just done; the run goes on when it is whole."""
        config = self.config
        state = {
            "samples": self.step * config.train.global_batch_size,
            "seed": config.train.seed,
            "engine": self.engine.state(),
            "model": config.model.model_dump(),
            "config": config.model_dump(by_alias=True),
        }
        self.latest = checkpoint.save(
            self.checkpoints,
            self.step,
            self.engine.tensors(),
            state,
            rank=self.mesh.place.rank,
            world=self.mesh.place.world_size,
            barrier=self.mesh.barrier,
            keep=config.checkpoint.keep,
        )
        self.logs.say(f"saved {self.latest}")

    def resume(self) -> int:
        """Restores what `checkpoint.resume` names, or else the weights of `checkpoint.weights`; returns the step to go on from."""
        # Rank 0 looked: others might see a shared file system in another state.
        found = (self.inputs.checkpoint, self.inputs.weights)
        whole, weights = (broadcast_text(str(path or ""), self.mesh.world, self.mesh.device) for path in found)
        if not whole and not weights:
            return 0
        reader = checkpoint.Reader(Path(whole or weights))
        for key, (tensor, box) in self.engine.tensors().items():
            if whole or key.startswith(WEIGHTS):
                reader.read_into(logical_name(key), box, tensor)
        # Which also rounds the weights just read into the parameters that compute.
        self.engine.load_state(reader.state["engine"] if whole else self.engine.state())
        if not whole:
            self.origin = reader.path
            return 0
        self.latest = reader.path
        return reader.step
