"""The one exception for a model that cannot be served."""


class ModelError(ValueError):
    """A model is unknown, inconsistent or damaged; the message is one line that names the file and what is wrong."""
