// The element types that MXQuantizeDequantize takes; the rows are generated from src/quark/formats/catalog.py.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "block_parameters.h"

namespace quark {

constexpr ElementRow kMxElements[] = {
#include "format_table.inc"
};

inline std::vector<const char*> mx_element_names() {
  std::vector<const char*> names;
  for (const ElementRow& row : kMxElements) names.push_back(row.name);
  return names;
}

// The row of that name, which must exist.
inline size_t mx_element_index(const char* name) {
  size_t index = 0;
  while (std::strcmp(kMxElements[index].name, name) != 0) ++index;
  return index;
}

}  // namespace quark
