"""Counted FLOPs and parameters, compared with published figures."""

import json
import re
from pathlib import Path

import pytest

from plan.arithmetic.work import Work, build_towers, count_work, network_calls
from plan.config import Networks, TextNetwork
from shards.base.errors import RequestError


@pytest.mark.heavy
def test_counting_sd2_gives_the_published_work(sd2: Work) -> None:
    """Buckets need not be square."""
    counted = count_work(Networks(), ["256x256", "512x512", "576x448"])
    assert 0.9 < counted.encode.pop("576x448") / counted.encode["512x512"] < 1
    del counted.train["576x448"], counted.backward["576x448"]
    assert counted == sd2


@pytest.mark.parametrize(
    "networks, bucket, message",
    [
        (
            Networks(backbone="nowhere.yaml"),
            "256x256",
            "networks.backbone: The config file nowhere.yaml does not exist.",
        ),
        (Networks(vae="nowhere.json"), "256x256", "nowhere.json cannot be read as JSON: .* No such file"),
        (
            Networks(vae="configs/plan.yaml"),
            "256x256",
            "configs/plan.yaml cannot be read as JSON: Expecting value",
        ),
        (Networks(vae="configs/unet/sd2-base.json"), "256x256", "networks.vae: diffusers cannot build an autoencoder"),
        (
            Networks(texts={"t5": TextNetwork(config="configs/text_encoder/t5-xxl.json", class_name="T5EncoderModel")}),
            "256x256",
            "networks.texts.t5.max_tokens is not set",
        ),
        (Networks(), "260x256", "260x256 is not a multiple of the VAE's downsampling factor, 8. Choose a different"),
    ],
)
def test_wrong_networks_are_refused(networks: Networks, bucket: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        count_work(networks, [bucket])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"training\.yaml must contain `key: value` pairs"),
        ("[backbone]", r"training\.yaml must contain `key: value` pairs"),
        ("a: {", r"training\.yaml cannot be read as YAML"),
        ("max_steps: 1", r"`backbone\.config` is missing"),
        ("backbone: {config: configs/unet/sd2-base.json, pack: 0}", r"`backbone\.pack` = 0: input should be greater"),
        ("backbone: {config: list.json}", r"list\.json is not a JSON object"),
        ("backbone: {config: sizes.json}", r"diffusers cannot build UNet2DConditionModel from .*sizes\.json"),
    ],
)
def test_wrong_training_configs_are_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "training.yaml"
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "sizes.json").write_text('{"cross_attention_dim": "wide"}')
    path.write_text(re.sub(r"(list|sizes)\.json", rf"{tmp_path}/\1.json", text))
    with pytest.raises(RequestError, match=message):
        count_work(Networks(backbone=str(path)), ["256x256"])


def test_text_encoder_must_fit_the_unet(tmp_path: Path) -> None:
    small = json.loads(Path("configs/text_encoder/sd2.json").read_text()) | {"hidden_size": 512}
    (tmp_path / "text.json").write_text(json.dumps(small))
    text = TextNetwork(config=str(tmp_path / "text.json"), class_name="CLIPTextModel")
    networks = Networks(texts={"text": text})
    _, image, encoders = build_towers(networks)
    with pytest.raises(RequestError, match=r"it attends to states of width 1024, but the text latents have width 512"):
        network_calls(networks, {"256x256": (32, 32)}, image, {name: tower for name, (_, tower) in encoders.items()})
