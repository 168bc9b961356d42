"""Sources of trees and batches: files, recorded decodings and generators."""
