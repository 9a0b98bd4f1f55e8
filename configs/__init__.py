"""Named experiments, one small file per family. Ships as `openpi_train_configs`; read by `openpi_train/registry.py`."""
