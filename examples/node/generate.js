// Streams one answer and prints it as JSON: node generate.js PROTO_FOLDER ADDRESS REQUEST_JSON
// Ends with 0 and {"events": [...]}, or with 1 and {"code": "...", "details": "..."}.
"use strict";

const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [protos, address, request] = process.argv.slice(2);
const definition = protoLoader.loadSync("sluice/v1/inference.proto", {
  includeDirs: [protos],
  enums: String,
  longs: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).sluice.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const events = [];
const call = client.generate(JSON.parse(request), { deadline: Date.now() + 60_000 });
call.on("data", (event) => events.push(event));
call.on("error", () => {}); // told by the status, which always comes
call.on("status", (status) => {
  const failed = status.code !== grpc.status.OK;
  console.log(
    JSON.stringify(failed ? { code: grpc.status[status.code], details: status.details } : { events }),
  );
  process.exitCode = failed ? 1 : 0;
  client.close();
});
