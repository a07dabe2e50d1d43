"""Sort the ImageNet validation images into class folders, and take one of each class for calibration.

mkdir val_data && tar -xzf val_images.tar.gz -C val_data
python prepare_data.py val_data calib_data
"""

from quark.cli.example_scripts import prepare_data

if __name__ == "__main__":
    prepare_data()
