// One-sided through RDMA adapters: the sink's reads the source's pool over a reliable connection (see verbs_path.h).
#include <stdexcept>
#include <utility>

#include "transfer/verbs_path.h"

namespace baton::transfer {
namespace {

void prepare(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) {
  fabrics.verbs = std::make_shared<VerbsDevices>(options, pool);
}

// A base class, so that it outlives the queue pair that reads it or reads into it.
struct RegisteredProof {
  RegisteredProof(VerbsDevice& device, ProofMemory made, bool readable)
      : memory(std::move(made)), registered(device.calls, device.pd, memory.data(), memory.size(), readable) {}

  ProofMemory memory;
  VerbsMemory registered;
};

class VerbsSource : private RegisteredProof, public OneSidedSource {
 public:
  VerbsSource(const Site& site, VerbsDevice& device)
      : RegisteredProof(device, ProofMemory(make_token()), true),
        OneSidedSource(site),
        server_(site, device, registered, reinterpret_cast<std::uint64_t>(memory.data()), memory.token()) {}

  Blob offer() const override { return server_.offer(); }
  bool check(const Blob& answer) override { return server_.check(answer); }
  bool has_more_to_offer() const override { return server_.has_more_to_offer(); }

 private:
  VerbsServer server_;
};

class VerbsHostSink : private RegisteredProof, public VerbsSink {
 public:
  VerbsHostSink(const Site& site, VerbsOffer offer, VerbsDevice& device)
      : RegisteredProof(device, ProofMemory(), false),
        VerbsSink(site, std::move(offer), device, {memory.data(), memory.size()}, registered) {}

 protected:
  Blob token_read() override { return memory.token(); }
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  try {
    return std::make_unique<VerbsSource>(site, verbs_devices(site).next());
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& blob, std::string& why) {
  auto offer = VerbsOffer::get(blob, site, why);
  if (!offer) return nullptr;
  try {
    VerbsDevice& device = verbs_devices(site).of_rail(offer->rail);
    return std::make_unique<VerbsHostSink>(site, std::move(*offer), device);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace

const Backend kVerbs{
    .name = "verbs",
    .at_source = &at_source,
    .at_sink = &at_sink,
    .striped = true,
    .prepare = &prepare,
    .fits = [](const Site& site) { return site.fabrics.verbs != nullptr && site.fabrics.verbs->present(); }};

}  // namespace baton::transfer
