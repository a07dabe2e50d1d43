"""Images for training and evaluation, for each process of a run.

ImageFolders      class folders of images on disk: train, calib, val
FolderBatches     batches for training, randomly cropped and mirrored; FolderHeldOut for evaluation
Arrays            images that fit into memory, such as CIFAR's; ArrayBatches and ArrayHeldOut, on a device
"""

from quark.vision.data.arrays import ArrayBatches, ArrayHeldOut, Arrays
from quark.vision.data.folders import FolderBatches, FolderHeldOut, ImageFolders, LabelledImages, open_folders

__all__ = [
    "ArrayBatches",
    "ArrayHeldOut",
    "Arrays",
    "FolderBatches",
    "FolderHeldOut",
    "ImageFolders",
    "LabelledImages",
    "open_folders",
]
