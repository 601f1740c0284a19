"""torchvision and torchaudio, cross-compiled against the torch wheel of the image."""
