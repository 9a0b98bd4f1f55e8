from openpi_train.models.pi0.pi0 import Pi0Config as Pi0Config
