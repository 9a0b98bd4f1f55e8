from openpi_train.models.language.language import LanguageConfig as LanguageConfig
