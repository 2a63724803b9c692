"""The client of Flower's quickstart. What makes it secure is the mod, nothing else."""

from __future__ import annotations

from fedward_client.secure_mod import secure_sum_mod
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp(mods=[secure_sum_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    data, _ = load_data(partition, int(context.node_config["num-partitions"]))
    config = msg.content["config"]
    seed = 1000 * int(config["server-round"]) + partition
    loss = train_fn(net, data, float(config["lr"]), float(config.get("proximal-mu", 0.0)), seed)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss, accuracy = test_fn(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
