"""What tests of training share."""

from tests.train.conftest import imported_stays  # noqa: F401
