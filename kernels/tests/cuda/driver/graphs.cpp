// Capture of streams, and graphs: what is submitted to a capturing stream becomes nodes; a launch runs them in a random
// order that their edges allow.
#include <pthread.h>

#include "device.h"

namespace driver {

namespace {

// True, and the capture is spoilt, if a capture is under way that this thread's call may not disturb.
bool spoils_capture(Device& device) {
  uint64_t here = static_cast<uint64_t>(pthread_self());
  for (auto& stream : device.streams) {
    // Mode 0, global: no thread may; mode 1, thread-local: the capturing thread may not; mode 2, relaxed: all may.
    if (stream->capture && (stream->capture->mode == 0 || (stream->capture->mode == 1 && stream->capture->thread == here))) {
      stream->capture->invalidated = true;
      return true;
    }
  }
  return false;
}

host::Fault run_nodes(Device& device, const std::vector<Node>& nodes) {
  std::vector<bool> done(nodes.size());
  for (size_t left = nodes.size(); left > 0; left--) {
    std::vector<size_t> able;
    for (size_t i = 0; i < nodes.size(); i++) {
      bool ready = !done[i];
      for (size_t before : nodes[i].after) ready = ready && done[before];
      if (ready) able.push_back(i);
    }
    size_t next = able[device.random(able.size())];
    host::Fault fault = nodes[next].work(device);
    if (fault.code) return fault;
    done[next] = true;
  }
  return {};
}

bool has_node_without_successor(const Capture& capture, const std::vector<size_t>& tail) {
  std::vector<bool> has(capture.graph.nodes.size());
  for (const Node& node : capture.graph.nodes) {
    for (size_t before : node.after) has[before] = true;
  }
  for (size_t last : tail) has[last] = true;
  for (bool one : has) {
    if (!one) return true;
  }
  return false;
}

}  // namespace

Result refuse_while_capturing(Device& device) { return spoils_capture(device) ? kCaptureUnsupported : kSuccess; }

}  // namespace driver

using namespace driver;

extern "C" int cuStreamBeginCapture_v2(void* handle, int mode) {
  ENTRY("cuStreamBeginCapture_v2");
  std::shared_ptr<Stream> stream = find_stream(dev, handle);
  if (!stream) return kInvalidHandle;
  if (stream == dev.null_stream) return kCaptureImplicit;
  if (stream->capture) return kInvalidValue;
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream.get();
  stream->capture->mode = mode;
  stream->capture->thread = static_cast<uint64_t>(pthread_self());
  stream->tail.clear();
  return kSuccess;
}

extern "C" int cuStreamIsCapturing(void* handle, int* status) {
  ENTRY("cuStreamIsCapturing");
  std::shared_ptr<Stream> stream = find_stream(dev, handle);
  if (!stream) return kInvalidHandle;
  *status = !stream->capture ? 0 : stream->capture->invalidated ? 2 : 1;
  return kSuccess;
}

extern "C" int cuStreamEndCapture(void* handle, void** graph) {
  ENTRY("cuStreamEndCapture");
  *graph = nullptr;
  std::shared_ptr<Stream> stream = find_stream(dev, handle);
  if (!stream) return kInvalidHandle;
  std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return kInvalidValue;
  if (capture->origin != stream.get()) return kCaptureUnmatched;
  if (capture->mode == 1 && capture->thread != static_cast<uint64_t>(pthread_self())) return kCaptureWrongThread;
  bool unjoined = has_node_without_successor(*capture, stream->tail);
  for (auto& other : dev.streams) {
    if (other->capture == capture) other->capture.reset();
  }
  if (capture->invalidated) return kCaptureInvalidated;
  if (unjoined) return kCaptureUnjoined;
  auto* made = new Graph(std::move(capture->graph));
  dev.graphs.insert(made);
  *graph = made;
  return kSuccess;
}

extern "C" int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  ENTRY("cuGraphInstantiateWithFlags");
  auto* from = static_cast<Graph*>(graph);
  if (!dev.graphs.count(from) || flags > 8) return kInvalidValue;
  auto* made = new Graph(*from);
  dev.executables.insert(made);
  *executable = made;
  return kSuccess;
}

// The result's fields: `CUgraphExecUpdateResult`, and the nodes that differ.
struct UpdateInfo {
  int result;
  void *node, *from;
};

extern "C" int cuGraphExecUpdate_v2(void* executable, void* graph, UpdateInfo* info) {
  ENTRY("cuGraphExecUpdate_v2");
  auto *to = static_cast<Graph*>(executable), *from = static_cast<Graph*>(graph);
  if (!dev.executables.count(to) || !dev.graphs.count(from)) return kInvalidValue;
  bool same = to->nodes.size() == from->nodes.size();
  for (size_t i = 0; same && i < to->nodes.size(); i++) {
    same = to->nodes[i].what == from->nodes[i].what && to->nodes[i].after == from->nodes[i].after;
  }
  // 2: the topology has changed.
  if (info) *info = {same ? 0 : 2, nullptr, nullptr};
  if (!same) return kGraphExecUpdateFailure;
  to->nodes = from->nodes;
  return kSuccess;
}

extern "C" int cuGraphUpload(void* executable, void* handle) {
  ENTRY("cuGraphUpload");
  if (!dev.executables.count(static_cast<Graph*>(executable)) || !find_stream(dev, handle)) return kInvalidValue;
  return kSuccess;
}

extern "C" int cuGraphLaunch(void* executable, void* handle) {
  ENTRY("cuGraphLaunch");
  auto* graph = static_cast<Graph*>(executable);
  if (!dev.executables.count(graph)) return kInvalidValue;
  // As it is at the launch: a later update is for later launches.
  auto nodes = std::make_shared<std::vector<Node>>(graph->nodes);
  return submit(dev, handle, "graph", [nodes](Device& device) { return run_nodes(device, *nodes); });
}

extern "C" int cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  ENTRY("cuGraphGetNodes");
  auto* from = static_cast<Graph*>(graph);
  if (!dev.graphs.count(from)) return kInvalidValue;
  if (nodes) {
    for (size_t i = 0; i < *count; i++) nodes[i] = i < from->nodes.size() ? &from->nodes[i] : nullptr;
  }
  *count = from->nodes.size();
  return kSuccess;
}

extern "C" int cuGraphExecDestroy(void* executable) {
  ENTRY("cuGraphExecDestroy");
  auto* graph = static_cast<Graph*>(executable);
  if (!dev.executables.erase(graph)) return kInvalidValue;
  delete graph;
  return kSuccess;
}

extern "C" int cuGraphDestroy(void* handle) {
  ENTRY("cuGraphDestroy");
  auto* graph = static_cast<Graph*>(handle);
  if (!dev.graphs.erase(graph)) return kInvalidValue;
  delete graph;
  return kSuccess;
}
