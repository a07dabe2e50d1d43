"""Images to train on and to judge by, for this process and the others of a run.

ImageFolders      class folders of images on a disk: train, calib, val
FolderBatches     some of them, cropped and turned at random, for training; FolderHeldOut as evaluation sees them
Arrays            images that fit into memory, such as CIFAR's; ArrayBatches and ArrayHeldOut, on a device
"""

from quark.vision.data.arrays import ArrayBatches, ArrayHeldOut, Arrays
from quark.vision.data.folder_batches import FolderBatches, FolderHeldOut
from quark.vision.data.folders import ImageFolders, LabelledImages, open_folders

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
