#include "custom_op.h"

#include <cstring>

namespace quark {

void check(const ort::Api& api, ort::Status* status) {
  if (status == nullptr) return;
  const std::string message = api.error_message(status);
  api.release_status(status);
  throw BadNode(message);
}

Attributes::Attributes(const ort::Api& api, const ort::KernelInfo* info, const char* op_name)
    : api_(api), info_(info), node_(std::string(op_name) + " node ''") {
  size_t size = 0;
  check(api, api.node_name(info, nullptr, &size));
  std::string name(size, '\0');
  check(api, api.node_name(info, &name[0], &size));
  name.resize(std::strlen(name.c_str()));
  node_ = std::string(op_name) + " node '" + name + "'";
}

// The interface answers the same kind of status for an absent attribute and for one of another type; only its text
// tells them apart, and only absence may be taken for the default.
bool Attributes::is_absent(ort::Status* status, const char* name) const {
  if (status == nullptr) return false;
  const std::string message = api_.error_message(status);
  api_.release_status(status);
  if (message.find("No attribute with") != std::string::npos) return true;
  throw BadNode(node_ + ": attribute '" + name + "' has the wrong type: " + message);
}

int64_t Attributes::integer(const char* name, int64_t absent, int64_t lowest, int64_t highest) const {
  int64_t value = absent;
  if (is_absent(api_.attribute_int(info_, name, &value), name)) return absent;
  if (value >= lowest && value <= highest) return value;
  const std::string upper = highest == INT64_MAX ? " or more" : ".." + std::to_string(highest);
  throw BadNode(node_ + ": attribute '" + name + "' is " + std::to_string(value) + "; expected " +
                std::to_string(lowest) + upper);
}

namespace {

// What may be no text at all, as text: a message must be readable by whoever gets it.
std::string printable(const std::string& value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : value) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      text += c;
    } else {
      text += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return text;
}

}  // namespace

size_t Attributes::choice(const char* name, size_t absent, const std::vector<const char*>& legal) const {
  // a string of any length: a first call asks for its size
  size_t size = 0;
  if (is_absent(api_.attribute_string(info_, name, nullptr, &size), name)) return absent;
  std::string value(size, '\0');
  check(api_, api_.attribute_string(info_, name, &value[0], &size));
  value.resize(size > 0 ? size - 1 : 0);  // without the end that C strings have
  std::string known;
  for (size_t i = 0; i < legal.size(); ++i) {
    if (value == legal[i]) return i;
    known += (i ? ", " : "") + std::string(legal[i]);
  }
  throw BadNode(node_ + ": attribute '" + name + "' is '" + printable(value) + "'; expected one of " + known);
}

int64_t Tensor::count() const {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

bool Call::has_input(size_t index) const {
  size_t count = 0;
  check(api_, api_.input_count(context_, &count));
  if (index >= count) return false;
  const ort::Value* value = nullptr;
  check(api_, api_.input(context_, index, &value));
  return value != nullptr;
}

Tensor Call::input(size_t index) const {
  const ort::Value* value = nullptr;
  check(api_, api_.input(context_, index, &value));
  ort::TypeAndShape* info = nullptr;
  check(api_, api_.tensor_type_and_shape(value, &info));
  Tensor tensor{};
  size_t rank = 0;
  ort::Status* status = api_.dimension_count(info, &rank);
  if (status == nullptr) {
    tensor.shape.resize(rank);
    status = api_.dimensions(info, tensor.shape.data(), rank);
  }
  if (status == nullptr) status = api_.element_type(info, &tensor.type);
  api_.release_type_and_shape(info);
  check(api_, status);
  check(api_, api_.tensor_data(const_cast<ort::Value*>(value), &tensor.data));
  return tensor;
}

Tensor Call::output(const std::vector<int64_t>& shape, ort::ElementType type) const {
  ort::Value* value = nullptr;
  check(api_, api_.output(context_, 0, shape.data(), shape.size(), &value));
  Tensor tensor{type, shape, nullptr};
  check(api_, api_.tensor_data(value, &tensor.data));
  return tensor;
}

std::string describe(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

size_t normalize_axis(int64_t axis, size_t rank, const std::string& node) {
  if (rank <= 1) return 0;
  const int64_t dims = static_cast<int64_t>(rank);
  if (axis < -dims || axis >= dims) {
    throw BadNode(node + ": attribute 'axis' is " + std::to_string(axis) + "; expected " + std::to_string(-dims) +
                  ".." + std::to_string(dims - 1) + " for a tensor of rank " + std::to_string(rank));
  }
  return static_cast<size_t>(axis < 0 ? axis + dims : axis);
}

ort::Status* infer_like(const ort::Api& api, ort::ShapeInferContext* context, size_t shape_input, size_t type_input) {
  ort::TypeAndShape* shaped = nullptr;
  ort::TypeAndShape* typed = nullptr;
  if (ort::Status* status = api.inferred_input(context, shape_input, &shaped)) return status;
  // A tensor of unknown rank looks like a scalar here. To say nothing is right for both; the type of an output is
  // known without us, from the one input of any type.
  size_t rank = 0;
  if (ort::Status* status = api.dimension_count(shaped, &rank)) return status;
  if (rank == 0) return nullptr;
  // A dimension without a size and without a name would become a size of -1, which no other shape fits.
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank, "");
  if (ort::Status* status = api.dimensions(shaped, sizes.data(), rank)) return status;
  if (ort::Status* status = api.symbolic_dimensions(shaped, names.data(), rank)) return status;
  for (size_t i = 0; i < rank; ++i) {
    if (sizes[i] < 0 && (names[i] == nullptr || *names[i] == '\0')) return nullptr;
  }
  if (ort::Status* status = api.inferred_input(context, type_input, &typed)) return status;
  if (shape_input == type_input) return api.infer_output(context, 0, shaped);
  ort::ElementType type = ort::kUndefined;
  ort::ElementType own = ort::kUndefined;
  if (ort::Status* status = api.element_type(typed, &type)) return status;
  if (ort::Status* status = api.element_type(shaped, &own)) return status;
  // borrow the input's shape, symbolic dimensions and all, under the other type
  if (ort::Status* status = api.set_element_type(shaped, type)) return status;
  ort::Status* status = api.infer_output(context, 0, shaped);
  ort::Status* restored = api.set_element_type(shaped, own);
  return status != nullptr ? status : restored;
}

}  // namespace quark
