from openpi_train.models.smolvla.smolvla import SmolVlaConfig as SmolVlaConfig
