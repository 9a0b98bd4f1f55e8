from openpi_train.models.act.act import ActConfig as ActConfig
