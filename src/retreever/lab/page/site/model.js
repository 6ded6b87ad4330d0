// Runs an exported model (encode.onnx, query.onnx, export.json) with onnxruntime-web.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // more need headers that a plain static server does not send
ort.env.wasm.wasmPaths = { wasm: new URL("./vendor/ort-wasm-simd-threaded.wasm", import.meta.url).href };

const TREE = ["keys", "values", "node_mask"];
const QUICK = { graphOptimizationLevel: "disabled" }; // done when the files were made; here it takes a second

export class Model {
  constructor(about, encode, query) {
    this.about = about;
    this.plan = about.tree;
    this.sessions = { encode, query };
    this.wide = about.files.encode.inputs.xc.shape[2];
  }

  static async load(folder) {
    const about = await (await fetch(`${folder}/export.json`)).json();
    const session = (part) => ort.InferenceSession.create(`${folder}/${about.files[part].file}`, QUICK);
    return new Model(about, await session("encode"), await session("query"));
  }

  // points: [{x: [...], y}], at least one and at most about.n.
  async encode(points) {
    const { n } = this.about;
    const xc = new Float32Array(n * this.wide);
    const yc = new Float32Array(n);
    const mask = new Uint8Array(n);
    points.forEach((point, i) => {
      xc.set(point.x, i * this.wide);
      yc[i] = point.y;
      mask[i] = 1;
    });
    const tree = await this.sessions.encode.run({
      xc: new ort.Tensor("float32", xc, [1, n, this.wide]),
      yc: new ort.Tensor("float32", yc, [1, n, 1]),
      mask: new ort.Tensor("bool", mask, [1, n]),
    });
    const order = Array.from(tree.order.data.slice(0, points.length), Number);
    return { tensors: tree, real: tree.node_mask.data, order };
  }

  // places: [[...], ...]; returns plain arrays, `size` numbers a query.
  async query(tree, places, budget, wanted) {
    const feeds = Object.fromEntries(TREE.map((name) => [name, tree.tensors[name]]));
    feeds.xt = new ort.Tensor("float32", Float32Array.from(places.flat()), [1, places.length, this.wide]);
    feeds.budget = new ort.Tensor("int64", BigInt64Array.of(BigInt(budget)), [1]);
    const found = await this.sessions.query.run(feeds, wanted);
    return Object.fromEntries(wanted.map((name) => [name, Array.from(found[name].data, Number)]));
  }
}
