"""The three layouts of an ImageNet download become the same two folders."""

import pytest
from tiny_models import image

from quark.errors import InvalidValueError
from quark.evaluate.datasets import prepare_data

CLASSES = {1: "n01443537", 2: "n01440764", 3: "n01443537", 4: "n01440764"}
SORTED = {
    "n01440764/ILSVRC2012_val_00000002.JPEG",
    "n01440764/ILSVRC2012_val_00000004.JPEG",
    "n01443537/ILSVRC2012_val_00000001.JPEG",
    "n01443537/ILSVRC2012_val_00000003.JPEG",
}
FIRST = {"n01440764/ILSVRC2012_val_00000002.JPEG", "n01443537/ILSVRC2012_val_00000001.JPEG"}


def name_of(number):
    return f"ILSVRC2012_val_{number:08d}"


def save(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image(100, size=8).save(path, format="JPEG")


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "val_data").mkdir()
    return tmp_path / "val_data", tmp_path / "calib_data"


def test_names_that_end_in_the_class(folders):
    val, calib = folders
    save(val, [f"{name_of(number)}_{label}.JPEG" for number, label in CLASSES.items()])
    done = prepare_data(val, calib)
    assert (done.moved, done.copied, done.classes) == (4, 2, 2)
    assert files(val) == SORTED
    assert files(calib) == FIRST


@pytest.mark.parametrize(
    "lines",
    [
        [f"{name_of(number)}.JPEG {label}" for number, label in CLASSES.items()],
        [label for _, label in sorted(CLASSES.items())],
        ["ImageId,PredictionString"] + [f"{name_of(n)},{label} 1 2 3 4" for n, label in CLASSES.items()],
    ],
    ids=["names and synsets", "synsets in order", "kaggle"],
)
def test_plain_names_with_a_label_file(folders, lines):
    val, calib = folders
    save(val, [f"{name_of(number)}.JPEG" for number in CLASSES])
    (val / "labels.txt").write_text("\n".join(lines) + "\n")
    prepare_data(val, calib)
    assert files(val) - {"labels.txt"} == SORTED
    assert files(calib) == FIRST


def test_numbers_of_classes_keep_their_order_as_folders(folders):
    val, calib = folders
    save(val, ["a.JPEG", "b.JPEG", "c.JPEG"])
    labels = val.parent / "val.txt"
    labels.write_text("a.JPEG 999\nb.JPEG 2\nc.JPEG 10\n")
    prepare_data(val, calib, labels)
    assert sorted(path.name for path in val.iterdir()) == ["00002", "00010", "00999"]


def test_folders_are_left_as_they_are(folders):
    val, calib = folders
    save(val, SORTED)
    assert prepare_data(val, calib).moved == 0
    assert files(val) == SORTED
    assert files(calib) == FIRST


def test_second_run_changes_nothing(folders):
    val, calib = folders
    save(val, [f"{name_of(number)}_{label}.JPEG" for number, label in CLASSES.items()])
    prepare_data(val, calib)
    done = prepare_data(val, calib)
    assert (done.moved, done.copied) == (0, 0)
    assert (files(val), files(calib)) == (SORTED, FIRST)


def test_a_run_that_was_interrupted_goes_on(folders):
    val, calib = folders
    save(val, [f"{name_of(1)}_{CLASSES[1]}.JPEG", *(name for name in SORTED if "00000001" not in name)])
    prepare_data(val, calib)
    assert files(val) == SORTED


def assert_refused(val, calib, *fragments, labels=None):
    before = files(val) if val.is_dir() else set()
    with pytest.raises(InvalidValueError) as caught:
        prepare_data(val, calib, labels)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert (files(val) if val.is_dir() else set()) == before


def test_errors_name_the_culprit_and_move_nothing(folders):
    val, calib = folders
    assert_refused(val, calib, "val_data", "no images")
    assert_refused(val.parent / "nowhere", calib, "nowhere", "no such folder")
    assert_refused(val, val / "calib", "inside")
    assert_refused(val, val, "inside")
    save(val, ["plain.JPEG", f"{name_of(1)}_n01440764.JPEG"])
    assert_refused(val, calib, "plain.JPEG", "--labels")
    assert_refused(val, calib, "absent.txt", labels=val / "absent.txt")
    (val / "labels.txt").write_text("other.JPEG n01440764\n")
    assert_refused(val, calib, "plain.JPEG", "labels.txt")
    (val / "labels.txt").write_text("plain.JPEG fish\n")
    assert_refused(val, calib, "fish")
    (val / "labels.txt").write_text("490\n")
    assert_refused(val, calib, "order is unknown")
    (val / "labels.txt").write_bytes(b"\xff\xfe\x00")
    assert_refused(val, calib, "cannot be read")
    (val / "labels.txt").unlink()
    calib.write_text("a file")
    assert_refused(val, calib, "is a file")


def test_a_sorted_file_is_not_overwritten(folders):
    val, calib = folders
    save(val, [f"{name_of(1)}_n01443537.JPEG", f"n01443537/{name_of(1)}.JPEG"])
    assert_refused(val, calib, "is there already")
