"""Models that come with their data and their recipe."""

from fleetx.applications.base import Application
from fleetx.applications.bert import Bert, Bert_base, Bert_large
from fleetx.applications.bert_config import BertConfig
from fleetx.applications.configs import parse_train_configs
from fleetx.applications.resnet50 import Resnet50

__all__ = ["Application", "Bert", "BertConfig", "Bert_base", "Bert_large", "Resnet50", "parse_train_configs"]
