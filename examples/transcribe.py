"""Speech to text: python examples/transcribe.py speech.wav (16 kHz, one channel, 16 bits). Needs a Whisper model."""

import sys
from pathlib import Path

from sluice.client import Audio, Client, Delta
from sluice.errors import SluiceError


def main(file: str) -> None:
    """Print the text as it comes. The gateway chooses the only model that takes audio."""
    with Client() as client, client.generate(Audio(Path(file).read_bytes())) as stream:
        for event in stream:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/transcribe.py FILE.wav")
    try:
        main(sys.argv[1])
    except SluiceError as error:
        sys.exit(f"{error.reason}: {error}")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}; name a WAV file")
