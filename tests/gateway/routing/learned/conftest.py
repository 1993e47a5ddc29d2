"""The routers that tests of learning have."""

from tests.learning.conftest import by_answer as by_answer
from tests.learning.conftest import by_prompt as by_prompt
