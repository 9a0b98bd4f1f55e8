from openpi_train.models.pi0_fast.pi0_fast import Pi0FastConfig as Pi0FastConfig
