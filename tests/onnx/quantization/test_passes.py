"""Graph passes that a YAML file names become the options that do the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import yaml
from onnx_models import conv_bn_relu, random_feed

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedOptionError
from quark.onnx import CLEConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantizationConfig, UInt8Spec
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.passes import TEMPLATES, with_passes

LAYER = QLayerConfig(UInt8Spec(), weight=Int8Spec())


def written(tmp_path, **content):
    path = tmp_path / "passes.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def settings(spec, **options):
    return settings_of(QuantizationConfig(extra_options={"ShapeShifterYaml": spec, **options}))


def test_only_the_passes_that_are_named_run(tmp_path):
    passes = {"onnx_fold_batch_norm": {"fold_batch_norm": True}}
    spec = written(tmp_path, passes={**passes, "onnx_convert_opset_version": {"target_opset_version": 19}})
    found = settings(spec, FuseGelu=True)
    assert found.load.opset == 19
    assert found.optimize.enabled == {"fold_batch_norm"}
    assert {"fold_constants", "fuse_gelu", "clip_to_relu"} <= found.optimize.disabled
    assert "ShapeShifterYaml" not in found.config["extra_options"]  # the file's content is recorded, not its path
    assert found.config["extra_options"]["FoldBatchNorm"] is True


def test_simplify_brings_the_general_rewrites_and_no_others(tmp_path):
    found = settings(written(tmp_path, preprocess_passes={"onnx_simplify": None}))
    assert "fold_constants" not in found.optimize.disabled
    assert "fold_batch_norm" in found.optimize.disabled


def test_passes_behind_quantizing_are_options_of_the_plan(tmp_path):
    spec = written(
        tmp_path,
        postprocess_passes={
            "onnx_remove_qdq_between_op_types": {"remove_qdq_between_op_types": [["Conv", "Tanh"]]},
            "onnx_align_scale": {"align_scale": ["Concat", "Slice"]},
        },
    )
    found = settings(spec)
    assert found.choose.unquantized_between == (("Conv", "Tanh"),)
    assert {"Concat", "Slice"} <= found.choose.aligned


def test_cross_layer_equalization_of_the_file_wins(tmp_path):
    spec = written(tmp_path, passes={"onnx_cross_layer_equalization": {"cle_steps": 3}})
    found = settings_of(QConfig(LAYER, algo_config=[CLEConfig(cle_steps=7)], ShapeShifterYaml=spec))
    assert found.equalize.cross_layer.steps == 3
    assert settings(spec).equalize.cross_layer.steps == 3


def test_every_template_is_possible():
    for name in TEMPLATES:
        assert settings(name.upper()).load.opset == 21


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"passes": {"onnx_fold_batch_nrm": {}}}, UnknownNameError, "Did you mean onnx_fold_batch_norm"),
        ({"passes": {"onnx_fold_div_into_matmul": {}}}, UnsupportedOptionError, "not have the pass 'onnx_fold_div"),
        ({"passes": {"onnx_align_scale": {}}}, InvalidValueError, "belongs under postprocess_passes"),
        ({"passes": {"onnx_simplify": {"simplfy": True}}}, UnknownNameError, "Did you mean simplify"),
        ({"passes": {"onnx_simplify": {"simplify_Options": {"a": 1}}}}, UnsupportedOptionError, "simplify_Options"),
        ({"passes": ["onnx_simplify"]}, InvalidValueError, "expected a mapping"),
        ({"pases": {}}, UnknownNameError, "Did you mean passes"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, content, error, message):
    with pytest.raises(error, match=message):
        settings(written(tmp_path, **content))


def test_shapes_become_the_option(tmp_path):
    spec = written(tmp_path, passes={"onnx_fix_shapes": {"input_output_name_shapes": {"x": [1, 3], "y": [1]}}})
    assert settings(spec).load.fixed_shapes == (("x", (1, 3)), ("y", (1,)))
    assert with_passes({"Percentile": 99.0}) == ({"Percentile": 99.0}, False)


def test_the_float_model_after_the_passes_is_written_beside_the_model(tmp_path):
    model = conv_bn_relu(batch="N")
    onnx.save(model, tmp_path / "m.onnx")
    spec = written(tmp_path, passes={"onnx_fold_batch_norm": {}})
    feed = {name: array[:1] for name, array in random_feed(model).items()}
    ModelQuantizer(QConfig(LAYER, PreprocessYAML=spec, PrintSummary=False)).quantize_model(
        tmp_path / "m.onnx", tmp_path / "q.onnx", [feed, feed]
    )
    folded = onnx.load(tmp_path / "m_preprocessed.onnx")
    assert "BatchNormalization" not in {node.op_type for node in folded.graph.node}
    from quark.onnx.session import open_session

    expected, found = (open_session(value).run(None, feed)[0] for value in (model, folded))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
