"""torchvision and torchaudio, cross-compiled against the image's torch wheel."""
