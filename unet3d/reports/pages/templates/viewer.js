// Shows the scan and its labels with NiiVue, and makes everything reachable by keyboard.
"use strict";
(async () => {
  const ALL = 3, AXIAL = 0, CORONAL = 1, SAGITTAL = 2, RENDER = 4;
  const VIEWS = [ALL, AXIAL, CORONAL, SAGITTAL, RENDER];
  // Depth, azimuth and elevation; a depth of 2 cuts nothing.
  const CUTS = [[2, 0, 0], [0, 270, 0], [0, 90, 0], [0, 0, 0], [0, 180, 0], [0, 0, -90], [0, 0, 90]];
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("viewer-data").textContent);
  // Lengths are those of data.unit, which NiiVue calls mm. The right of a patient is on the left;
  // where the file does not say what is right, X runs to the right.
  const LEFT = data.is_anatomical ? 1 : -1;
  // What left and up, and the next plane, are along X, Y, Z.
  const MOVES = {
    [ALL]: { left: [LEFT, 0, 0], up: [0, 1, 0], next: [0, 0, 1] },
    [AXIAL]: { left: [LEFT, 0, 0], up: [0, 1, 0], next: [0, 0, 1] },
    [CORONAL]: { left: [LEFT, 0, 0], up: [0, 0, 1], next: [0, 1, 0] },
    [SAGITTAL]: { left: [0, LEFT, 0], up: [0, 0, 1], next: [1, 0, 0] },
  };
  const canvas = element("canvas");
  const shown = data.labels.map(() => true);
  const toggles = [...document.querySelectorAll(".toggle")];
  const radios = [...document.querySelectorAll("input[name=view]")];

  const fail = (reason) => {
    element("viewer").hidden = true;
    document.documentElement.classList.remove("has-viewer");
    element("viewer-note").hidden = false;
    element("viewer-note").textContent = `The viewer cannot be shown: ${reason}. A picture is shown instead.`;
  };
  if (!document.createElement("canvas").getContext("webgl2")) {
    fail("this browser has no WebGL 2, or it is switched off");
    return;
  }
  element("viewer").hidden = false;
  document.documentElement.classList.add("has-viewer");

  const viewer = new niivue.Niivue({
    clipPlaneColor: [0, 0, 0, 0],
    crosshairColor: [1, 1, 1, 0.7],
    crosshairWidthUnit: "mm",
    dragAndDropEnabled: false,
    isOrientationTextVisible: data.is_anatomical,
    isRadiologicalConvention: data.is_anatomical,
    loadingText: "",
    logLevel: "error",
    multiplanarLayout: 2,
    multiplanarShowRender: 1,
    sagittalNoseLeft: data.is_anatomical,
    scrollRequiresFocus: true,
    showAllOrientationMarkers: data.is_anatomical,
  });

  // NiiVue looks a colour up at no less than 2/256 of the table, so the background is further up.
  // It draws whatever has any opacity, so the width is a power of two: no rounding of the card's
  // then finds a bit of the colour beside.
  let width = 2;
  const unused = () => Math.ceil(width / 128);
  while (width < unused() + 1 + data.labels.length) width *= 2;
  const numbers = Array.from({ length: width }, (_, place) => place - unused());
  const each = (of, other = 0) =>
    numbers.map((number) => (data.labels[number - 1] ? of(data.labels[number - 1], number) : other));
  const colours = () => ({
    I: numbers,
    R: each((label) => parseInt(label.colour.slice(1, 3), 16)),
    G: each((label) => parseInt(label.colour.slice(3, 5), 16)),
    B: each((label) => parseInt(label.colour.slice(5, 7), 16)),
    A: each((_, number) => (shown[number - 1] ? 255 : 0)),
  });
  // Each of these takes effect with the next update, which takes a while where volumes are large.
  const update = () => viewer.updateGLVolume();
  const setOpacity = (percent) => {
    element("opacity").value = percent;
    viewer.volumes[1].opacity = Number(element("opacity").value) / 100;
  };
  const setShown = (isShown, number) => {
    shown[number - 1] = isShown;
    toggles[number - 1].checked = isShown;
  };
  const setColours = () => viewer.volumes[1].setColormapLabel(colours());
  const setGreys = (black, white) => {
    const smallest = (data.greys[1] - data.greys[0]) / 255;
    viewer.volumes[0].cal_min = black;
    viewer.volumes[0].cal_max = Math.max(white, black + smallest);
  };
  const showGreys = () => {
    element("black").value = viewer.volumes[0].cal_min;
    element("white").value = viewer.volumes[0].cal_max;
  };
  // A crosshair has its width in the volume; thinner than a pixel it would vanish here and there.
  const fitCrosshair = () => {
    const [x, y, z] = data.extent;
    const fit = (across, up) => Math.min(canvas.clientWidth / across, canvas.clientHeight / up);
    const fits = {
      [ALL]: fit(x + y, y + z),
      [AXIAL]: fit(x, y),
      [CORONAL]: fit(x, z),
      [SAGITTAL]: fit(y, z),
      [RENDER]: fit(Math.max(x, y), Math.max(y, z)),
    };
    const pixel = 1 / fits[viewer.opts.sliceType];
    viewer.opts.crosshairGap = 6 * pixel;
    viewer.setCrosshairWidth(1.5 * pixel);
  };
  const setView = (view) => {
    radios.find((radio) => Number(radio.value) === view).checked = true;
    viewer.setSliceType(view);
    fitCrosshair();
  };
  const goTo = (mm) => {
    viewer.scene.crosshairPos = viewer.mm2frac(mm);
    viewer.createOnLocationChange();
    viewer.drawScene();
  };
  const largest = data.labels.reduce(
    (best, label) => (label.place && (!best || label.num_voxels > best.num_voxels) ? label : best),
    null,
  );
  let cut = 0;
  const setCut = (index) => {
    cut = index % CUTS.length;
    viewer.setClipPlane(CUTS[cut]);
  };
  const reset = () => {
    setCut(0);
    viewer.setPan2Dxyzmm([0, 0, 0, 1]);
    viewer.setRenderAzimuthElevation(150, 15);
    data.labels.forEach((_, index) => setShown(true, index + 1));
    setColours();
    setOpacity(50);
    setGreys(...data.shown);
    showGreys();
    update();
    setView(ALL);
    if (largest) goTo(largest.place);
    else viewer.createOnLocationChange();
  };

  viewer.onLocationChange = ({ mm, values }) => {
    const place = ["LR", "PA", "IS"].map((ends, axis) =>
      data.is_anatomical
        ? `${ends[mm[axis] < 0 ? 0 : 1]} ${Math.abs(mm[axis]).toFixed(1)}`
        : `${"XYZ"[axis]} ${mm[axis].toFixed(2)}`,
    );
    const label = values[1] && data.labels[values[1].value - 1];
    const intensity = Number(values[0].value.toPrecision(4));
    element("place").textContent =
      `${place.join("  ")} ${data.unit} · intensity ${intensity} · ${label ? label.name : "no label"}`;
  };
  viewer.onIntensityChange = showGreys;

  try {
    await viewer.attachToCanvas(canvas);
    for (const [id, name, options] of [
      ["viewer-image", "scan.nii.gz", { cal_min: data.shown[0], cal_max: data.shown[1] }],
      ["viewer-labels", "labels.nii.gz", { opacity: 0.5 }],
    ]) {
      const base64 = element(id).textContent;
      const volume = await niivue.NVImage.loadFromBase64({ base64, name, ...options });
      if (id === "viewer-labels") volume.setColormapLabel(colours());
      viewer.addVolume(volume);
    }
  } catch (error) {
    fail(error.message);
    return;
  }

  const then = (change) => (...values) => {
    change(...values);
    update();
  };
  const changeShown = then((isShown, number) => {
    setShown(isShown, number);
    setColours();
  });
  const changeOpacity = then(setOpacity);
  for (const id of ["black", "white"]) {
    [element(id).min, element(id).max] = data.greys;
    element(id).step = (data.greys[1] - data.greys[0]) / 255 || 1;
    element(id).addEventListener("input", then(() =>
      setGreys(Number(element("black").value), Number(element("white").value)),
    ));
  }
  element("opacity").addEventListener("input", (event) => changeOpacity(event.target.value));
  element("cut").addEventListener("click", () => setCut(cut + 1));
  element("reset").addEventListener("click", reset);
  radios.forEach((radio) => radio.addEventListener("change", () => setView(Number(radio.value))));
  toggles.forEach((toggle, index) => {
    toggle.disabled = false;
    toggle.addEventListener("change", () => changeShown(toggle.checked, index + 1));
  });
  document.querySelectorAll("button.place").forEach((button) => {
    button.disabled = false;
    button.addEventListener("click", () => goTo(data.labels[button.dataset.number - 1].place));
  });

  new ResizeObserver(fitCrosshair).observe(canvas);

  let before = 50;
  const move = (direction, sign) => {
    const view = viewer.opts.sliceType;
    if (view !== RENDER) {
      viewer.moveCrosshairInVox(...MOVES[view][direction].map((one) => sign * one));
    } else if (direction !== "next") {
      const [turn, tilt] = direction === "left" ? [-5 * sign, 0] : [0, 5 * sign];
      viewer.setRenderAzimuthElevation(
        viewer.scene.renderAzimuth + turn, viewer.scene.renderElevation + tilt,
      );
    }
  };
  const opacity = () => Number(element("opacity").value);
  const keys = {
    ArrowLeft: () => move("left", 1),
    ArrowRight: () => move("left", -1),
    ArrowUp: () => move("up", 1),
    ArrowDown: () => move("up", -1),
    PageUp: () => move("next", 1),
    PageDown: () => move("next", -1),
    v: () => setView(VIEWS[(VIEWS.indexOf(viewer.opts.sliceType) + 1) % VIEWS.length]),
    o: () => {
      if (opacity() > 0) before = opacity();
      changeOpacity(opacity() > 0 ? 0 : before);
    },
    "+": () => changeOpacity(opacity() + 10),
    "-": () => changeOpacity(opacity() - 10),
    c: () => setCut(cut + 1),
    r: reset,
  };
  keys["="] = keys["+"]; // the same key, without shift
  for (let number = 1; number <= Math.min(9, shown.length); number += 1) {
    keys[number] = () => changeShown(!shown[number - 1], number);
  }
  // NiiVue has keys of its own, which work only under the mouse; it is not asked.
  for (const kind of ["keydown", "keyup"]) {
    canvas.parentElement.addEventListener(kind, (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      event.stopPropagation();
      if (!(key in keys)) return;
      event.preventDefault();
      if (kind === "keydown") keys[key]();
    }, { capture: true });
  }
  reset();
  document.documentElement.classList.add("is-ready");
})();
